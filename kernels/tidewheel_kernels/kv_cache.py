"""Writes to, and copies inside, the paged KV cache.

A cache is a [num_blocks, block_size, num_kv_heads, head_dim] tensor whose last dimension is contiguous; slot s is
offset ``s % block_size`` of block ``s // block_size``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidewheel_kernels.backend import Op


def write_kv_cache(
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], last dimension contiguous
    v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], last dimension contiguous
    slot_mapping: torch.Tensor,  # [num_tokens] int64, -1 = skip
    k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
) -> None:
    """Store each token's keys and values in its slot. Slots of one call are distinct."""
    _WRITE.on(k)(k, v, slot_mapping, k_cache, v_cache)


def write_kv_cache_reference(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    kept = (slot_mapping >= 0).nonzero().squeeze(-1)
    slots = slot_mapping[kept]
    block_size = k_cache.shape[1]
    index = (slots // block_size, slots % block_size)
    k_cache.index_put_(index, k[kept].to(k_cache.dtype))
    v_cache.index_put_(index, v[kept].to(v_cache.dtype))


def write_kv_cache_cpu(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """Make one copy per cache if no row is padding. Blocks of a cache must be adjacent."""
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        write_kv_cache_reference(k, v, slot_mapping, k_cache, v_cache)
        return
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def copy_blocks(
    caches: Sequence[torch.Tensor] | torch.Tensor,  # each, or each caches[i]: [num_blocks, ...]
    src: torch.Tensor,  # [num_copies] int64, on the caches' device
    dst: torch.Tensor,  # [num_copies] int64
) -> None:
    """Copy block ``src[i]`` to block ``dst[i]`` in every cache (copy-on-write of forked sequences).

    A stacked tensor [num_caches, num_blocks, ...] takes one launch, a list one per cache. Elements of a block must be
    contiguous. No block may be in `dst` twice, or in both `src` and `dst`.
    """
    if src.shape != dst.shape or src.dim() != 1:
        raise ValueError(f"src and dst must be vectors of one length, got {tuple(src.shape)} and {tuple(dst.shape)}")
    if src.shape[0] == 0:
        return
    stacks = [caches] if isinstance(caches, torch.Tensor) else [cache.unsqueeze(0) for cache in caches]
    for stack in stacks:
        _COPY.on(stack)(stack, src, dst)


def copy_blocks_reference(stack: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    stack[:, dst.long()] = stack[:, src.long()]


_WRITE = Op(
    "write_kv_cache", reference=write_kv_cache_reference, kernel="jit.kv_cache:write_kv_cache", cpu=write_kv_cache_cpu
)
_COPY = Op("copy_blocks", reference=copy_blocks_reference, kernel="jit.kv_cache:copy_blocks")
