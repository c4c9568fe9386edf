"""Any slots of tokens in groups: a file of its own, as hypothesis may be missing where a GPU is."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from tidewheel_kernels.lora import TILE, group_tokens, max_tiles


@given(st.lists(st.integers(-1, 6), max_size=200), st.integers(0, 3))
def test_groups_hold_each_token_with_an_adapter_once(slots: list[int], spare: int) -> None:
    num_tiles = max_tiles(len(slots), len(set(slots) - {-1})) + spare
    tokens, tile_slots = group_tokens(np.array(slots, dtype=np.int32), num_tiles)
    assert (tokens.dtype, tile_slots.dtype, tokens.shape, tile_slots.shape) == (
        np.int32, np.int32, (num_tiles * TILE,), (num_tiles,),
    )  # fmt: skip
    found = Counter(int(token) for token in tokens if token >= 0)
    assert found == Counter(token for token, slot in enumerate(slots) if slot >= 0)
    for tile, slot in zip(tokens.reshape(num_tiles, TILE), tile_slots, strict=True):
        held = tile[tile >= 0]
        assert {slots[token] for token in held} == ({slot} if slot >= 0 else set())
        assert (tile[: len(held)] >= 0).all() and (np.diff(held) > 0).all()
    used = [slot for slot in tile_slots if slot >= 0]
    assert used == sorted(used) and list(tile_slots[: len(used)]) == used


@given(st.integers(0, 300), st.integers(1, 20), st.randoms())
def test_no_tokens_need_more_tiles_than_the_bound(num_tokens: int, max_loras: int, draw: random.Random) -> None:
    bound = max_tiles(num_tokens, max_loras)
    slots = np.array([draw.randrange(-1, max_loras) for _ in range(num_tokens)], dtype=np.int32)
    group_tokens(slots, bound)
    # The bound is reached: as many adapters as can be have one token in their last tile.
    num_slots = min(num_tokens, max_loras)
    most = [*range(num_slots), *[0] * (num_tokens - num_slots)]
    _, tile_slots = group_tokens(np.array(most, dtype=np.int32), bound)
    assert (tile_slots >= 0).all()
