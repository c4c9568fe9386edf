from __future__ import annotations

import torch

NormResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> NormResult:
    total = x if residual is None else x + residual
    normed = normalized(total, weight.float() + weight_offset, eps)
    return normed if residual is None else (normed, total)


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * scale * weight.float()).to(x.dtype)
