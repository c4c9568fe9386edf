from __future__ import annotations

import torch
from torch.nn.functional import silu

from tidewheel_kernels.native.library import LONG, POINTER, THREADS, NativeKernel, num_threads

_silu_and_mul = NativeKernel("silu_and_mul", *[POINTER] * 2, *[LONG] * 3, THREADS)


def silu_and_mul_cpu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def silu_and_mul_native(gate_up: torch.Tensor) -> torch.Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype)
    _silu_and_mul.of(gate_up.dtype)(
        gate_up.data_ptr(), out.data_ptr(), num_rows, width, gate_up.stride(0), num_threads(num_rows)
    )
    return out
