"""Writes to, and copies inside, a paged KV cache [num_blocks, block_size, num_kv_heads, head_dim].

The last dimension is contiguous. Slot s is offset ``s % block_size`` of block ``s // block_size``. An `FP8` cache has
`scales` [2, num_kv_heads] float32, of keys and values, and holds values divided by their head's scale, within ±448.
`codes` describes an int8 cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidewheel_kernels.choice import Op
from tidewheel_kernels.kv_cache.codes import check_codes
from tidewheel_kernels.kv_cache.cpu import write_kv_cache_cpu
from tidewheel_kernels.kv_cache.reference import FP8, copy_blocks_reference, write_kv_cache_reference


def write_kv_cache(
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], last dimension contiguous
    v: torch.Tensor,  # like k
    slot_mapping: torch.Tensor,  # [num_tokens] int64, -1 = skip
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
) -> None:
    """Store each token's keys and values in its slot. All slots of a call must differ."""
    check_scales(k_cache, scales)
    _WRITE.chosen[k.device, k.dtype](k, v, slot_mapping, k_cache, v_cache, scales)


def check_scales(k_cache: torch.Tensor, scales: torch.Tensor | None) -> None:
    if (scales is not None) != (k_cache.dtype == FP8):
        given = "none" if scales is None else tuple(scales.shape)
        raise TypeError(
            f"the cache is {k_cache.dtype} and its scales are {given}: {FP8} has scales, others have none"
        )
    check_codes(k_cache)


def copy_blocks(
    caches: Sequence[torch.Tensor] | torch.Tensor,  # each [num_blocks, ...]
    src: torch.Tensor,  # [num_copies] int64
    dst: torch.Tensor,  # like src
) -> None:
    """Copy block ``src[i]`` to ``dst[i]`` in every cache; caches stacked in one tensor take one launch.

    Elements of a block must be contiguous. No block may be in `dst` twice, or in both `src` and `dst`.
    """
    if src.shape != dst.shape or src.dim() != 1:
        raise ValueError(f"src and dst must be vectors of one length, got {tuple(src.shape)} and {tuple(dst.shape)}")
    if src.shape[0] == 0:
        return
    stacks = [caches] if isinstance(caches, torch.Tensor) else [cache.unsqueeze(0) for cache in caches]
    for stack in stacks:
        _COPY.chosen[stack.device, stack.dtype](stack, src, dst)


_WRITE = Op("write_kv_cache", __name__, reference=write_kv_cache_reference, cpu=write_kv_cache_cpu)
_COPY = Op("copy_blocks", __name__, reference=copy_blocks_reference)
