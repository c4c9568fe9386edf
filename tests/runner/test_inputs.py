"""Flat inputs, built over whole columns, equal what a loop over rows and tokens builds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidewheel.batch import NewRow, ScheduledBatch
from tidewheel.request import Request
from tidewheel.runner.inputs import RowTable
from tidewheel.sampling import SamplingParams

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 6, 70, 16
MAX_BLOCKS = -(-MAX_MODEL_LEN // BLOCK_SIZE)
CPU = torch.device("cpu")


def int32(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def new_row(row: int, token_ids: np.ndarray) -> NewRow:
    request = Request(f"r{row}", token_ids, SamplingParams(), max_tokens=1, arrival_time=0.0)
    return NewRow(row, request, token_ids, request.sampling)


def make_batch(
    rows: list[int], starts: list[int], counts: list[int], samples: list[bool], **more: object
) -> ScheduledBatch:
    return ScheduledBatch(
        step_id=1, rows=int32(rows), start_positions=int32(starts), num_scheduled_tokens=int32(counts),
        samples=np.array(samples), num_decodes=sum(count == 1 for count in counts), num_tokens=sum(counts), **more,
    )  # fmt: skip


def updated(table: RowTable, batch: ScheduledBatch) -> None:
    """Told of a batch, and its changes sent to the device."""
    table.apply(batch, [torch.from_numpy(array) for array in table.update(batch)])


def block_tables(table: RowTable, rows: list[int], max_seq_len: int = MAX_MODEL_LEN) -> list[list[int]]:
    return table.block_tables(torch.tensor(rows, dtype=torch.int32), max_seq_len).tolist()


@pytest.fixture(params=[True, False], ids=["shared memory", "tables of its own"])
def shares_memory(request: pytest.FixtureRequest) -> bool:
    return request.param


def filled(generator: np.random.Generator, *, shares_memory: bool = True) -> tuple[RowTable, np.ndarray, np.ndarray]:
    """A table whose every row has tokens and blocks, and the same as plain arrays."""
    table = RowTable(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, CPU, shares_memory=shares_memory)
    tokens = generator.integers(0, 1000, (MAX_NUM_SEQS, MAX_MODEL_LEN), dtype=np.int32)
    blocks = generator.permutation(MAX_NUM_SEQS * MAX_BLOCKS).astype(np.int32).reshape(MAX_NUM_SEQS, MAX_BLOCKS)
    rows, indices = np.indices(blocks.shape, dtype=np.int32)
    updated(
        table,
        make_batch(
            [0], [0], [1], [False],
            new_rows=tuple(new_row(row, tokens[row]) for row in range(MAX_NUM_SEQS)),
            block_rows=rows.ravel(), block_indices=indices.ravel(), block_ids=blocks.ravel(),
        ),
    )  # fmt: skip
    return table, tokens, blocks


CASES = {
    "one decode": ([3], [17], [1], [True]),
    "decodes": ([5, 0, 2], [0, 69, 16], [1, 1, 1], [True, True, True]),
    "one prefill": ([1], [0], [70], [True]),
    "mixed": ([4, 1, 0, 2], [33, 15, 0, 48], [1, 1, 16, 22], [True, True, False, True]),
    "no row samples": ([0, 1], [0, 8], [8, 3], [False, False]),
}


@pytest.mark.parametrize("name", CASES)
def test_inputs_equal_those_of_a_loop(name: str, shares_memory: bool) -> None:
    rows, starts, counts, samples = CASES[name]
    table, tokens, blocks = filled(np.random.default_rng(0), shares_memory=shares_memory)
    batch = make_batch(rows, starts, counts, samples)
    host = table.host_inputs(batch)

    positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
    owners = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    slots = [
        blocks[row, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row, position in zip(owners, positions, strict=True)
    ]
    read = table.tokens_at(torch.from_numpy(host.token_indices)).tolist()
    assert read == [tokens[r, p] for r, p in zip(owners, positions, strict=True)]
    assert host.positions.tolist() == positions
    assert host.slot_mapping.tolist() == slots
    assert host.cu_seqlens_q.tolist() == np.cumsum([0, *counts]).tolist()
    assert host.seq_lens.tolist() == [start + count for start, count in zip(starts, counts, strict=True)]
    ends = np.cumsum(counts) - 1
    assert host.logit_indices.tolist() == [end for end, sampled in zip(ends, samples, strict=True) if sampled]
    widest = -(-max(host.seq_lens) // BLOCK_SIZE) if shares_memory else MAX_BLOCKS
    tables = table.block_tables(torch.from_numpy(host.rows), int(host.seq_lens.max()))
    assert np.array_equal(tables.numpy(), blocks[rows, :widest])
    table.store(torch.from_numpy(host.store_indices), torch.full(host.store_indices.shape, 7777))
    stored = np.argwhere(all_tokens(table) == 7777).tolist()
    assert stored == sorted([row, end] for row, end, s in zip(rows, host.seq_lens, samples, strict=True) if s)


def all_tokens(table: RowTable) -> np.ndarray:
    indices = torch.arange(MAX_NUM_SEQS * (MAX_MODEL_LEN + 1))
    return table.tokens_at(indices).numpy().reshape(MAX_NUM_SEQS, -1)


def test_rows_change_only_where_the_batch_says_so(shares_memory: bool) -> None:
    table, _, blocks = filled(np.random.default_rng(0), shares_memory=shares_memory)
    before = all_tokens(table)
    tokens = int32([7, 8, 9])
    change = make_batch(
        [2], [0], [3], [True], new_rows=(new_row(2, tokens),),
        block_rows=int32([2]), block_indices=int32([1]), block_ids=int32([99]),
    )  # fmt: skip
    updated(table, change)
    tokens[:] = 0  # the table keeps its own copy
    after = all_tokens(table)
    assert after[2, :3].tolist() == [7, 8, 9]
    before[2, :3] = [7, 8, 9]
    assert np.array_equal(after, before)
    blocks[2, 1] = 99
    assert block_tables(table, list(range(MAX_NUM_SEQS))) == blocks.tolist()


def test_a_place_that_is_named_twice_gets_the_last_block() -> None:
    table, _, _ = filled(np.random.default_rng(0), shares_memory=False)
    twice = make_batch(
        [1], [0], [1], [True],
        block_rows=int32([1, 1]), block_indices=int32([0, 0]), block_ids=int32([70, 71]),
    )  # fmt: skip
    _, block_ids, *_ = table.update(twice)
    assert block_ids.tolist() == [71, 71]


def test_drafts_are_the_inputs_of_their_entries(shares_memory: bool) -> None:
    table, tokens, _ = filled(np.random.default_rng(0), shares_memory=shares_memory)
    batch = make_batch([2, 2, 2, 4], [9, 10, 11, 5], [1] * 4, [True] * 4, draft_tokens=int32([-1, 77, 78, -1]))
    updated(table, batch)
    host = table.host_inputs(batch)
    read = table.tokens_at(torch.from_numpy(host.token_indices)).tolist()
    assert read == [tokens[2, 9], 77, 78, tokens[4, 5]]
    assert host.seq_lens.tolist() == [10, 11, 12, 6]


def test_a_token_that_could_not_be_sampled_is_stored_as_one_that_can_be_embedded() -> None:
    table, _, _ = filled(np.random.default_rng(0))
    table.store(torch.tensor([3]), torch.tensor([-1]))
    assert table.tokens_at(torch.tensor([3])).tolist() == [0]


def test_padding_reads_and_writes_where_nobody_is(shares_memory: bool) -> None:
    table, _, _ = filled(np.random.default_rng(0), shares_memory=shares_memory)
    before = all_tokens(table)
    host = table.host_inputs(make_batch([4, 1], [33, 15], [1, 1], [True, True]))
    padded = table.padded(host, 5)
    assert padded.rows.tolist() == [4, 1, *[MAX_NUM_SEQS] * 3]
    assert padded.seq_lens.tolist() == [34, 16, 0, 0, 0]
    assert padded.slot_mapping[2:].tolist() == [-1] * 3
    assert padded.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 5]
    assert padded.logit_indices.tolist() == [0, 1, 2, 3, 4]
    assert [column.dtype for column in padded] == [column.dtype for column in host]
    assert table.padded(host, 2) is host
    assert table.tokens_at(torch.from_numpy(padded.token_indices[2:])).tolist() == [0, 0, 0]
    table.store(torch.from_numpy(padded.store_indices[2:]), torch.tensor([5, 6, 7]))
    assert np.array_equal(all_tokens(table), before)
    assert block_tables(table, [MAX_NUM_SEQS]) == [[0] * MAX_BLOCKS]
    nothing = table.padding(3)
    assert [column.tolist() for column in nothing[4:]] == [
        [0] * 3,
        [MAX_NUM_SEQS] * 3,
        [0, 1, 2],
        nothing[7].tolist(),
    ]
