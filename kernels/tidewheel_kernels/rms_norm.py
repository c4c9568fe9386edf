"""Root-mean-square normalisation, alone or fused with the residual addition."""

from __future__ import annotations

import torch

from tidewheel_kernels.backend import Op

NormResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden], last dimension contiguous
    weight: torch.Tensor,  # [hidden]
    eps: float,
    residual: torch.Tensor | None = None,  # [num_tokens, hidden]
    *,
    weight_offset: float = 0.0,
) -> NormResult:
    """Return ``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)``, computed in float32, in x's dtype.

    With `residual`, normalise ``s = x + residual`` (rounded to x's dtype, as by a separate addition) and return
    ``(normed, s)``. Inputs are not modified. `weight_offset` is 1.0 for Gemma-style checkpoints.
    """
    return _OP.on(x)(x, weight, eps, residual, weight_offset=weight_offset)


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
) -> NormResult:
    total = x if residual is None else x + residual
    values = total.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    normed = (values * scale * (weight.float() + weight_offset)).to(x.dtype)
    return normed if residual is None else (normed, total)


def rms_norm_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
) -> NormResult:
    total = x if residual is None else x + residual
    weight = weight + weight_offset if weight_offset else weight
    normed = torch.rms_norm(total, weight.shape, weight, eps)
    return normed if residual is None else (normed, total)


_OP = Op(
    "rms_norm",
    reference=rms_norm_reference,
    kernel="jit.rms_norm:rms_norm",
    cpu=rms_norm_cpu,
    native="native.ops:rms_norm",
)
