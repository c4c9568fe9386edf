from __future__ import annotations

import numpy as np
import pytest
import torch

from support.kernels.kernel_harness import paged_batch
from tidewheel_kernels.attention.cpu_plan import (
    FREE_PADDING,
    MAX_PADDING_RATIO,
    MAX_QUERY_LEN,
    PlanKey,
    cut,
    grouped,
    make_plan,
)

MAX_KEYS = 2000
KEY = PlanKey(block_size=16, num_q_heads=4, num_kv_heads=2, head_dim=8, sliding_window=0, dtype=torch.float32)


def random_lengths(seed: int) -> list[tuple[int, int]]:
    random = np.random.default_rng(seed)
    decodes = [(1, int(n)) for n in random.integers(1, 600, 40)]
    chunks = [(int(n), int(n + context)) for n, context in random.integers(1, 700, (5, 2))]
    return decodes + chunks


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_in_one_group(seed: int) -> None:
    batch = paged_batch(random_lengths(seed), head_dim=8)
    plan = make_plan(batch.meta, KEY)
    rows = torch.cat([group.rows for group in plan.groups])
    assert sorted(rows.tolist()) == list(range(batch.q.shape[0]))
    assert plan.empty_rows.numel() == 0


@pytest.mark.parametrize("seed", range(5))
def test_padding_stays_small_and_calls_few(seed: int) -> None:
    lengths = random_lengths(seed)
    starts = np.cumsum([0, *(query_len for query_len, _ in lengths)])
    parts = list(grouped(cut(starts, np.array([seq_len for _, seq_len in lengths]), 0), MAX_KEYS))
    for part in parts:
        assert len(set(part.query_len.tolist())) == 1
        padded = int(part.num_keys.max()) * len(part.num_keys)
        assert padded <= MAX_PADDING_RATIO * int(part.num_keys.sum()) + FREE_PADDING
        assert padded <= MAX_KEYS or len(part.num_keys) == 1
    assert sum(part.query_len[0] == 1 for part in parts) <= 14


def test_long_chunks_are_cut_and_early_pieces_read_fewer_keys() -> None:
    pieces = cut(np.array([0, 600]), np.array([700]), 0)
    assert pieces.query_len.tolist() == [MAX_QUERY_LEN, MAX_QUERY_LEN, 600 - 2 * MAX_QUERY_LEN]
    assert pieces.key_end.tolist() == [100 + MAX_QUERY_LEN, 100 + 2 * MAX_QUERY_LEN, 700]


def test_a_window_limits_what_is_gathered() -> None:
    pieces = cut(np.array([0, 1, 11]), np.array([500, 100]), 64)
    assert pieces.num_keys.tolist() == [64, 73]


def test_rows_without_keys_are_listed() -> None:
    plan = make_plan(paged_batch([(1, 0), (1, 3), (1, 0)]).meta, KEY)
    assert plan.empty_rows.tolist() == [0, 2]


def test_equal_decodes_need_no_mask() -> None:
    plan = make_plan(paged_batch([(1, 20), (1, 20)]).meta, KEY)
    assert [group.mask for group in plan.groups] == [None]


def test_a_whole_prompt_is_causal_and_a_later_chunk_is_not() -> None:
    whole, later = (paged_batch([(20, seq_len), (20, seq_len)]).meta for seq_len in (20, 30))
    [group] = make_plan(whole, KEY).groups
    assert group.is_causal
    [group] = make_plan(later, KEY).groups
    assert not group.is_causal and group.mask is not None
    assert (group.mask == 0).sum(-1).tolist() == list(range(11, 31))
    [group] = make_plan(whole, KEY._replace(sliding_window=8)).groups
    assert not group.is_causal
