from __future__ import annotations

import torch

from tidewheel_kernels.choice import Op
from tidewheel_kernels.native.library import FLOAT, LONG, POINTER, THREADS, NativeKernel, mixed_dtypes
from tidewheel_kernels.norm.cpu import rms_norm_cpu
from tidewheel_kernels.norm.reference import NormResult, rms_norm_reference

_rms_norm = NativeKernel("rms_norm", *[POINTER] * 5, *[LONG] * 4, FLOAT, FLOAT, THREADS)


def rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden], last dimension contiguous
    weight: torch.Tensor,  # [hidden]
    eps: float,
    residual: torch.Tensor | None = None,  # [num_tokens, hidden]
    *,
    weight_offset: float = 0.0,
) -> NormResult:
    """Return ``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)``, computed in float32, in x's dtype.

    With `residual`, normalise ``s = x + residual``, rounded to x's dtype, and return ``(normed, s)``. `weight_offset`
    is 1.0 for Gemma-style checkpoints.
    """
    return _OP.chosen[x.device, x.dtype](x, weight, eps, residual, weight_offset)


def rms_norm_native(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> NormResult:
    if weight.dtype != x.dtype or (residual is not None and residual.dtype != x.dtype):
        raise mixed_dtypes(x.dtype, weight, residual)
    num_rows, width = x.shape
    normed = torch.empty(num_rows, width, dtype=x.dtype)
    total = None if residual is None else torch.empty(num_rows, width, dtype=x.dtype)
    _rms_norm[x.dtype](
        x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), normed.data_ptr(),
        None if total is None else total.data_ptr(), num_rows, width, x.stride(0),
        0 if residual is None else residual.stride(0), eps, weight_offset, torch.get_num_threads(),
    )  # fmt: skip
    return normed if total is None else (normed, total)


_OP = Op("rms_norm", __name__, reference=rms_norm_reference, cpu=rms_norm_cpu, native=rms_norm_native)
