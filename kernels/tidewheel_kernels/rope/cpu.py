from __future__ import annotations

import torch

from tidewheel_kernels.kv_cache.cpu import write_kv_cache_cpu


def rope_and_cache_cpu(
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
    """Rotate queries and keys as one tensor, without a copy if they are float32 and side by side."""
    num_q_heads, head_dim = q.shape[1:]
    heads = _side_by_side(q, k)
    values = torch.cat((q, k), dim=1).float() if heads is None else heads.float()
    if q_norm_weight is not None and k_norm_weight is not None:
        norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        values.mul_(norm.square_().div_(head_dim).add_(eps).rsqrt_())
        values[:, :num_q_heads].mul_(q_norm_weight)
        values[:, num_q_heads:].mul_(k_norm_weight)
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    _rotate_in_place(values, cos, sin)
    if values is not heads:
        q.copy_(values[:, :num_q_heads])
        k.copy_(values[:, num_q_heads:])
    write_kv_cache_cpu(k, v, slot_mapping, k_cache, v_cache, scales)


def _side_by_side(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    num_tokens, num_q_heads, head_dim = q.shape
    num_heads = num_q_heads + k.shape[1]
    follows = k.data_ptr() == q.data_ptr() + num_q_heads * head_dim * q.itemsize
    fused = q.stride() == k.stride() and q.stride(1) == head_dim and q.stride(0) >= num_heads * head_dim
    return q.as_strided((num_tokens, num_heads, head_dim), q.stride()) if follows and fused else None


def _rotate_in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    from_second, from_first = second * sin, first * sin
    first.mul_(cos).sub_(from_second)
    second.mul_(cos).add_(from_first)
