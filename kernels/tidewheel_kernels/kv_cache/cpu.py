from __future__ import annotations

import torch

from tidewheel_kernels.kv_cache.codes import INT8
from tidewheel_kernels.kv_cache.reference import scales_of, stored, write_kv_cache_reference


def write_kv_cache_cpu(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    """Copy all tokens with one operation per cache, whose blocks adjoin, unless a slot is -1 or the cache int8."""
    if k_cache.dtype == INT8 or (slot_mapping.numel() and int(slot_mapping.min()) < 0):
        write_kv_cache_reference(k, v, slot_mapping, k_cache, v_cache, scales)
        return
    for cache, values, of_heads in zip((k_cache, v_cache), (k, v), scales_of(scales), strict=True):
        rows = cache.view(-1, *values.shape[1:])
        if of_heads is not None:  # torch copies no rows of 8-bit floats
            rows, values = rows.view(torch.uint8), stored(values, cache.dtype, of_heads).view(torch.uint8)
        rows.index_copy_(0, slot_mapping, values)
