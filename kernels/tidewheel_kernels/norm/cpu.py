from __future__ import annotations

import torch

from tidewheel_kernels.norm.reference import NormResult


def rms_norm_cpu(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> NormResult:
    total = x if residual is None else x + residual
    weight = weight + weight_offset if weight_offset else weight
    normed = torch.rms_norm(total, weight.shape, weight, eps)
    return normed if residual is None else (normed, total)
