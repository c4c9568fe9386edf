from __future__ import annotations

import torch

from tidewheel_kernels.kv_cache.reference import write_kv_cache_reference
from tidewheel_kernels.norm.reference import normalized


def rope_and_cache_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    eps: float,
    scales: torch.Tensor | None,
) -> None:
    cos, sin = cos_sin_cache.float()[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    for heads, weight in ((q, q_norm_weight), (k, k_norm_weight)):
        values = heads.float() if weight is None else normalized(heads.float(), weight, eps)
        heads.copy_(rotate_neox(values, cos, sin))
    write_kv_cache_reference(k, v, slot_mapping, k_cache, v_cache, scales)


def rotate_neox(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` elements of each head."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
