from __future__ import annotations

import torch

from tidewheel_kernels.kv_cache.codes import INT8, rounded, scales_behind

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448; no infinity


def write_kv_cache_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    kept = (slot_mapping >= 0).nonzero().squeeze(-1)
    slots = slot_mapping[kept]
    block_size = k_cache.shape[1]
    index = (slots // block_size, slots % block_size)
    for cache, values, of_heads in zip((k_cache, v_cache), (k, v), scales_of(scales), strict=True):
        if cache.dtype == INT8:
            codes, of_rows = rounded(values[kept])
            cache.index_put_(index, codes)
            scales_behind(cache).index_put_(index, of_rows)
        else:
            cache.index_put_(index, stored(values[kept], cache.dtype, of_heads))


def scales_of(scales: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if scales is None else (scales[0], scales[1])


def stored(values: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None) -> torch.Tensor:
    """Return `values` [..., num_heads, head_dim] in `dtype`; with `scales`, divided and clamped to it."""
    if scales is not None:
        values = (values.float() / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return values.to(dtype)


def copy_blocks_reference(stack: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    stack[:, dst.long()] = stack[:, src.long()]
