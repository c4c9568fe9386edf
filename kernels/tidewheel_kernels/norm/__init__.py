from __future__ import annotations

import torch

from tidewheel_kernels.choice import Op
from tidewheel_kernels.norm.cpu import rms_norm_cpu, rms_norm_native
from tidewheel_kernels.norm.reference import NormResult, rms_norm_reference


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


_OP = Op("rms_norm", __name__, reference=rms_norm_reference, cpu=rms_norm_cpu, native=rms_norm_native)
