from __future__ import annotations

import torch

from tidewheel_kernels.choice import Op
from tidewheel_kernels.kv_cache import check_scales
from tidewheel_kernels.kv_cache.codes import scales_at
from tidewheel_kernels.native.library import FLOAT, LONG, POINTER, THREADS, NativeKernel, mixed_dtypes
from tidewheel_kernels.rope.cpu import rope_and_cache_cpu
from tidewheel_kernels.rope.reference import rope_and_cache_reference

_rope_and_cache = NativeKernel("rope_and_cache", *[POINTER] * 10, *[LONG] * 15, FLOAT, THREADS)


def rope_and_cache(
    q: torch.Tensor,  # [num_tokens, num_q_heads, head_dim], rotated in place
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], rotated in place
    v: torch.Tensor,  # like k
    cos_sin_cache: torch.Tensor,  # [max_position, rotary_dim] float32, cat(cos, sin)
    positions: torch.Tensor,  # [num_tokens] int64 or int32
    slot_mapping: torch.Tensor,  # [num_tokens] int64, -1 = not cached
    k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,  # like k_cache
    *,
    q_norm_weight: torch.Tensor | None = None,  # [head_dim]
    k_norm_weight: torch.Tensor | None = None,  # [head_dim]
    eps: float = 1e-6,
    scales: torch.Tensor | None = None,  # as `kv_cache` says
) -> None:
    """Rotate q and k in place, computing in float32, and store rotated k, and v, in the cache.

    q, k and v may be views into one tensor with a contiguous last dimension. The rotation pairs element i with i +
    rotary_dim / 2 (NeoX style); elements from rotary_dim on keep their values. Norm weights (both or none) first
    RMS-normalise every head. Raise `ValueError` for one alone or a bad rotary_dim.
    """
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("give q_norm_weight and k_norm_weight, or neither")
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim % 2 or rotary_dim > q.shape[-1]:
        raise ValueError(f"rotary_dim must be even and at most head_dim {q.shape[-1]}, got {rotary_dim}")
    if scales is not None or k_cache.dtype != q.dtype:
        check_scales(k_cache, scales)
    rope_and_cache = _OP.chosen[q.device, q.dtype]
    weights = (q_norm_weight, k_norm_weight)
    rope_and_cache(q, k, v, cos_sin_cache, positions, slot_mapping, k_cache, v_cache, *weights, eps, scales)


def rope_and_cache_native(
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
    if scales is not None:
        weights = (q_norm_weight, k_norm_weight)
        rope_and_cache_cpu(q, k, v, cos_sin_cache, positions, slot_mapping, k_cache, v_cache, *weights, eps, scales)
        return
    norms: tuple[int | None, int | None] = (None, None)
    if q_norm_weight is not None and k_norm_weight is not None:
        if q_norm_weight.dtype != q.dtype or k_norm_weight.dtype != q.dtype:
            raise mixed_dtypes(q.dtype, q_norm_weight, k_norm_weight)
        norms = q_norm_weight.data_ptr(), k_norm_weight.data_ptr()
    num_tokens, num_q_heads, head_dim = q.shape
    positions = positions.long()
    _rope_and_cache[q.dtype](
        q.data_ptr(), k.data_ptr(), v.data_ptr(), cos_sin_cache.data_ptr(), positions.data_ptr(),
        slot_mapping.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), *norms,
        num_tokens, num_q_heads, k.shape[1], head_dim, cos_sin_cache.shape[-1] // 2,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], k_cache.shape[1], scales_at(k_cache), k_cache.stride(0),
        v_cache.stride(0), eps, torch.get_num_threads(),
    )  # fmt: skip


_OP = Op(
    "rope_and_cache",
    __name__,
    reference=rope_and_cache_reference,
    cpu=rope_and_cache_cpu,
    native=rope_and_cache_native,
)
