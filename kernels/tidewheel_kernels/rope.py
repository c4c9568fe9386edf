"""Rotary position embedding, fused with q/k normalisation and the KV-cache write."""

from __future__ import annotations

import torch

from tidewheel_kernels.backend import Op
from tidewheel_kernels.kv_cache import write_kv_cache_cpu, write_kv_cache_reference
from tidewheel_kernels.rms_norm import rms_norm_reference


def rope_and_cache(
    q: torch.Tensor,  # [num_tokens, num_q_heads, head_dim], rotated in place
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], rotated in place
    v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin_cache: torch.Tensor,  # [max_position, rotary_dim] float32, cat(cos, sin)
    positions: torch.Tensor,  # [num_tokens] int64 or int32
    slot_mapping: torch.Tensor,  # [num_tokens] int64, -1 = not cached
    k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    *,
    q_norm_weight: torch.Tensor | None = None,  # [head_dim]
    k_norm_weight: torch.Tensor | None = None,  # [head_dim]
    eps: float = 1e-6,
) -> None:
    """Rotate q and k in place, and store the rotated k, and v, in the cache.

    Only the last dimension must be contiguous: q, k and v may be views into a fused QKV output. The rotation pairs
    element i with i + rotary_dim / 2 (NeoX style) and leaves elements from rotary_dim on unchanged. Norm weights
    (both or none) RMS-normalise every head before rotation. Arithmetic is float32.
    """
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("give q_norm_weight and k_norm_weight, or neither")
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim % 2 or rotary_dim > q.shape[-1]:
        raise ValueError(f"rotary_dim must be even and at most head_dim {q.shape[-1]}, got {rotary_dim}")
    _OP.on(q)(
        q, k, v, cos_sin_cache, positions, slot_mapping, k_cache, v_cache,
        q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, eps=eps,
    )  # fmt: skip


def rope_and_cache_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    cos, sin = cos_sin_cache.float()[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    for heads, weight in ((q, q_norm_weight), (k, k_norm_weight)):
        values = heads.float()
        if weight is not None:
            values = _normed(values, weight, eps)
        heads.copy_(rotate_neox(values, cos, sin))
    write_kv_cache_reference(k, v, slot_mapping, k_cache, v_cache)


def rope_and_cache_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
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
    rotate_in_place(values, cos, sin)
    if values is not heads:
        q.copy_(values[:, :num_q_heads])
        k.copy_(values[:, num_q_heads:])
    write_kv_cache_cpu(k, v, slot_mapping, k_cache, v_cache)


def _side_by_side(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Return a view [num_tokens, num_q_heads + num_kv_heads, head_dim] if k follows q in a fused projection."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_heads = num_q_heads + k.shape[1]
    follows = k.data_ptr() == q.data_ptr() + num_q_heads * head_dim * q.itemsize
    fused = q.stride() == k.stride() and q.stride(1) == head_dim and q.stride(0) >= num_heads * head_dim
    return q.as_strided((num_tokens, num_heads, head_dim), q.stride()) if follows and fused else None


def rotate_in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Apply `rotate_neox` in place."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    from_second, from_first = second * sin, first * sin
    first.mul_(cos).sub_(from_second)
    second.mul_(cos).add_(from_first)


def rotate_neox(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` elements of x's last dimension; cos and sin broadcast over heads."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _normed(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed = rms_norm_reference(values, weight, eps)
    assert isinstance(normed, torch.Tensor)
    return normed


_OP = Op(
    "rope_and_cache",
    reference=rope_and_cache_reference,
    kernel="jit.rope:rope_and_cache",
    cpu=rope_and_cache_cpu,
    native="native.ops:rope_and_cache",
)
