from __future__ import annotations

import torch

from tidewheel_kernels.kv_cache.reference import write_kv_cache_reference


def write_kv_cache_cpu(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """Make one copy per cache if no row is padding. Blocks of a cache must be adjacent."""
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        write_kv_cache_reference(k, v, slot_mapping, k_cache, v_cache)
        return
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)
