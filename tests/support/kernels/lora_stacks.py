"""Random adapters of a layer, and tokens grouped by them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tidewheel_kernels.lora import TILE, LoraGroups, LoraSizes, LoraStack, group_tokens, max_tiles


def fill(stack: LoraStack, ranks: Sequence[Sequence[int]], seed: int = 0) -> None:
    """Set slots from 0 on, by the ranks of their parts; 0: the part has no adapter."""
    generator = torch.Generator().manual_seed(seed)
    sizes = stack.sizes

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[1] ** -0.5).to(stack.dtype).to(stack.device)

    for slot, of_parts in enumerate(ranks):
        parts = zip(of_parts, sizes.part_sizes, strict=True)
        stack.set(
            slot, [(drawn(rank, sizes.in_features), drawn(size, rank)) if rank else None for rank, size in parts]
        )


def drawn_stack(
    kind: type[LoraStack],
    in_features: int,
    part_sizes: tuple[int, ...],
    ranks: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: str = "cpu",
) -> LoraStack:
    max_rank = max(rank for of_parts in ranks for rank in of_parts)
    sizes = LoraSizes(in_features, part_sizes, len(ranks) + 1, max_rank)
    stack = kind(sizes, dtype, torch.device(device))
    fill(stack, ranks)
    return stack


def grouped(slots: Sequence[int], device: str = "cpu", *, spare_tiles: int = 1) -> LoraGroups:
    """Group tokens by slot, negative without an adapter; some tiles are left empty."""
    num_tiles = max_tiles(len(slots), len(set(slots))) + spare_tiles
    tokens, tile_slots = group_tokens(np.array(slots, dtype=np.int32), num_tiles)
    assert len(tokens) == num_tiles * TILE
    return LoraGroups(torch.from_numpy(tokens).to(device), torch.from_numpy(tile_slots).to(device))
