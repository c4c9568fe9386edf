"""Tokens of a step in tiles of one adapter each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

TILE = 16  # tokens; `tl.dot` takes no fewer rows
EMPTY = -1  # token or slot of padding

Int32Array = npt.NDArray[np.int32]


class LoraGroups(NamedTuple):
    """Tokens with adapters. A tile's tokens ascend, then comes padding; tiles of one slot are neighbours."""

    tokens: torch.Tensor  # [num_tiles * TILE] int32; negative: padding
    slots: torch.Tensor  # [num_tiles] int32; negative: an empty tile

    @property
    def num_tiles(self) -> int:
        return len(self.slots)


def max_tiles(num_tokens: int, max_loras: int) -> int:
    """Return the most tiles that `num_tokens` tokens with up to `max_loras` adapters can need."""
    num_slots = min(num_tokens, max_loras)
    return num_slots + (num_tokens - num_slots) // TILE


def group_tokens(slots_of_tokens: Int32Array, num_tiles: int) -> tuple[Int32Array, Int32Array]:
    """Return `tokens` and `slots` of `LoraGroups` for slots [num_tokens], negative for tokens without an adapter.

    Tokens keep their order within a slot. Raise `ValueError` if they need more tiles.
    """
    order = np.argsort(slots_of_tokens, kind="stable")
    order = order[np.searchsorted(slots_of_tokens[order], 0) :]
    found, starts, counts = np.unique(slots_of_tokens[order], return_index=True, return_counts=True)
    tiles = -(-counts // TILE)
    num_used = int(tiles.sum())
    if num_used > num_tiles:
        raise ValueError(f"{len(order)} tokens of {len(found)} adapters need {num_used} tiles, got {num_tiles}")
    tokens = np.full(num_tiles * TILE, EMPTY, np.int32)
    first_tokens = (np.cumsum(tiles) - tiles) * TILE
    tokens[np.arange(len(order)) + np.repeat(first_tokens - starts, counts)] = order
    slots = np.full(num_tiles, EMPTY, np.int32)
    slots[:num_used] = np.repeat(found, tiles)
    return tokens, slots
