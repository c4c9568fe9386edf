"""The KV cache of 8-bit integers, for a CPU: each key and value of a head has a float32 scale.

The scales [num_kv_heads, block_size] of a block lie behind its codes, so that copies of whole blocks take them along.
"""

from __future__ import annotations

import math

import torch

INT8 = torch.int8
LARGEST = 127
LEAST = 2.0**-100  # scale whose reciprocal is finite
SCALE_BYTES = 4


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a head's key or value, with its scale."""
    return head_dim * dtype.itemsize + SCALE_BYTES * (dtype == INT8)


def codes_of(blocks: torch.Tensor, block_size: int, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """View int8 blocks [..., num_blocks, bytes] as a cache [..., num_blocks, block_size, num_kv_heads, head_dim]."""
    codes = blocks[..., : block_size * num_kv_heads * head_dim]
    return codes.view(*blocks.shape[:-1], block_size, num_kv_heads, head_dim)


def scales_at(cache: torch.Tensor) -> int:
    """Return how many bytes from a block's begin its scales lie; 0: the cache is not of codes."""
    return math.prod(cache.shape[1:]) if cache.dtype == INT8 else 0


def scales_behind(cache: torch.Tensor) -> torch.Tensor:
    """View the scales of a cache of codes, [num_blocks, block_size, num_kv_heads]."""
    num_blocks, block_size, num_kv_heads, _ = cache.shape
    size = (num_blocks, num_kv_heads * block_size * SCALE_BYTES)
    behind = cache.as_strided(size, (cache.stride(0), 1), cache.storage_offset() + scales_at(cache))
    return behind.view(torch.float32).view(num_blocks, num_kv_heads, block_size).transpose(1, 2)


def check_codes(cache: torch.Tensor) -> None:
    """Raise an error if an int8 cache is on a GPU, or has no room for scales."""
    if cache.dtype != INT8:
        return
    if cache.is_cuda:
        raise TypeError(f"a cache of {INT8} is for a CPU: use another dtype on {cache.device}")
    needed = math.prod(cache.shape[1:3]) * head_bytes(cache.shape[3], INT8)
    # torch gives a dimension of one block any stride.
    room = cache.stride(0) if len(cache) > 1 else cache.untyped_storage().nbytes() - cache.storage_offset()
    if room < needed:
        raise ValueError(f"blocks of codes and scales take {needed} bytes, got {room}: use `codes_of`")


def rounded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes like `values` [..., head_dim], and scales [...], NaN for rows that are not finite."""
    values = values.float()
    scales = values.abs().amax(-1) / LARGEST
    scales = scales.masked_fill(~scales.isfinite(), math.nan)
    inverse = torch.where(scales > LEAST, 1 / scales, 0.0)
    codes = (values * inverse.unsqueeze(-1)).round().clamp(-LARGEST, LARGEST)
    return codes.nan_to_num().to(INT8), scales
