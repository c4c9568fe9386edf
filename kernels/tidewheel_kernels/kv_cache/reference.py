from __future__ import annotations

import torch


def write_kv_cache_reference(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    kept = (slot_mapping >= 0).nonzero().squeeze(-1)
    slots = slot_mapping[kept]
    block_size = k_cache.shape[1]
    index = (slots // block_size, slots % block_size)
    k_cache.index_put_(index, k[kept].to(k_cache.dtype))
    v_cache.index_put_(index, v[kept].to(v_cache.dtype))


def copy_blocks_reference(stack: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    stack[:, dst.long()] = stack[:, src.long()]
