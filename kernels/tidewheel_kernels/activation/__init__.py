from __future__ import annotations

import torch

from tidewheel_kernels.activation.cpu import silu_and_mul_cpu
from tidewheel_kernels.activation.reference import silu_and_mul_reference
from tidewheel_kernels.choice import Op
from tidewheel_kernels.native.library import LONG, POINTER, THREADS, NativeKernel

_silu_and_mul = NativeKernel("silu_and_mul", *[POINTER] * 2, *[LONG] * 3, THREADS)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map ``cat(gate, up)`` [num_tokens, 2 * I] to ``silu(gate) * up`` [num_tokens, I]."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up needs an even last dimension, got shape {tuple(gate_up.shape)}")
    return _OP.chosen[gate_up.device, gate_up.dtype](gate_up)


def silu_and_mul_native(gate_up: torch.Tensor) -> torch.Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype)
    _silu_and_mul[gate_up.dtype](
        gate_up.data_ptr(), out.data_ptr(), num_rows, width, gate_up.stride(0), torch.get_num_threads()
    )
    return out


_OP = Op("silu_and_mul", __name__, reference=silu_and_mul_reference, cpu=silu_and_mul_cpu, native=silu_and_mul_native)
