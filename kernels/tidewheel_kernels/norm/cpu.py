from __future__ import annotations

import torch

from tidewheel_kernels.native.library import FLOAT, LONG, POINTER, THREADS, NativeKernel, address, num_threads
from tidewheel_kernels.norm.reference import NormResult

_rms_norm = NativeKernel("rms_norm", *[POINTER] * 5, *[LONG] * 4, FLOAT, FLOAT, THREADS)


def rms_norm_cpu(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> NormResult:
    total = x if residual is None else x + residual
    weight = weight + weight_offset if weight_offset else weight
    normed = torch.rms_norm(total, weight.shape, weight, eps)
    return normed if residual is None else (normed, total)


def rms_norm_native(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> NormResult:
    num_rows, width = x.shape
    normed = torch.empty(num_rows, width, dtype=x.dtype)
    total = None if residual is None else torch.empty(num_rows, width, dtype=x.dtype)
    _rms_norm.of(x.dtype)(
        x.data_ptr(), address(residual, x), address(weight, x), normed.data_ptr(), address(total, x), num_rows,
        width, x.stride(0), 0 if residual is None else residual.stride(0), eps, weight_offset, num_threads(num_rows),
    )  # fmt: skip
    return normed if total is None else (normed, total)
