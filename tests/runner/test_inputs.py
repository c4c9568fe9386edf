"""Flat inputs, built over whole columns, equal what a loop over rows and tokens builds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidewheel.batch import NewRow, ScheduledBatch
from tidewheel.runner.inputs import DeviceInputs, RowTable, metadata
from tidewheel.runner.staging import Staging
from tidewheel.sampling import SamplingParams

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 6, 70, 16
MAX_BLOCKS = -(-MAX_MODEL_LEN // BLOCK_SIZE)
CPU = torch.device("cpu")


def int32(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def new_row(row: int, token_ids: np.ndarray) -> NewRow:
    return NewRow(row, f"r{row}", token_ids, len(token_ids), SamplingParams(), 0, (), ())


def make_batch(
    rows: list[int], starts: list[int], counts: list[int], samples: list[bool], **more: object
) -> ScheduledBatch:
    return ScheduledBatch(
        step_id=1, rows=int32(rows), start_positions=int32(starts), num_scheduled_tokens=int32(counts),
        samples=np.array(samples), num_decodes=sum(count == 1 for count in counts), num_tokens=sum(counts), **more,
    )  # fmt: skip


def filled(generator: np.random.Generator) -> tuple[RowTable, np.ndarray, np.ndarray]:
    """A table whose every row has tokens and blocks, and the same as plain arrays."""
    table = RowTable(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, CPU)
    tokens = generator.integers(0, 1000, (MAX_NUM_SEQS, MAX_MODEL_LEN), dtype=np.int32)
    blocks = generator.permutation(MAX_NUM_SEQS * MAX_BLOCKS).astype(np.int32).reshape(MAX_NUM_SEQS, MAX_BLOCKS)
    rows, indices = np.indices(blocks.shape, dtype=np.int32)
    table.update(
        make_batch(
            [0], [0], [1], [False],
            new_rows=tuple(new_row(row, tokens[row]) for row in range(MAX_NUM_SEQS)),
            block_rows=rows.ravel(), block_indices=indices.ravel(), block_ids=blocks.ravel(),
        )
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
def test_inputs_equal_those_of_a_loop(name: str) -> None:
    rows, starts, counts, samples = CASES[name]
    table, tokens, blocks = filled(np.random.default_rng(0))
    batch = make_batch(rows, starts, counts, samples)
    host = table.host_inputs(batch)

    positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
    owners = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    slots = [
        blocks[row, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row, position in zip(owners, positions, strict=True)
    ]
    flat = table.flat_token_ids.numpy()
    assert flat[host.token_indices].tolist() == [tokens[r, p] for r, p in zip(owners, positions, strict=True)]
    assert host.positions.tolist() == positions
    assert host.slot_mapping.tolist() == slots
    assert host.cu_seqlens_q.tolist() == np.cumsum([0, *counts]).tolist()
    assert host.seq_lens.tolist() == [start + count for start, count in zip(starts, counts, strict=True)]
    ends = np.cumsum(counts) - 1
    assert host.logit_indices.tolist() == [end for end, sampled in zip(ends, samples, strict=True) if sampled]
    widest = -(-max(host.seq_lens) // BLOCK_SIZE)
    assert np.array_equal(host.block_tables, blocks[rows, :widest])
    flat[host.store_indices] = -7
    stored = np.argwhere(flat.reshape(MAX_NUM_SEQS, -1) == -7).tolist()
    assert stored == sorted([row, end] for row, end, s in zip(rows, host.seq_lens, samples, strict=True) if s)


def test_metadata_describes_the_batch() -> None:
    table, _, _ = filled(np.random.default_rng(0))
    batch = make_batch(*CASES["mixed"])
    host = table.host_inputs(batch)
    meta = metadata(host, DeviceInputs(*Staging(CPU).to_device([host])[0]), batch)
    assert (meta.num_decodes, meta.max_seqlen_q, meta.max_seq_len, meta.num_seqs) == (2, 22, 70, 4)
    assert meta.slot_mapping.dtype == torch.int64
    assert meta.block_tables.dtype == meta.seq_lens.dtype == meta.cu_seqlens_q.dtype == torch.int32
    assert np.array_equal(meta.seq_lens.numpy(), meta.host_seq_lens())


def test_rows_change_only_where_the_batch_says_so() -> None:
    table, _, blocks = filled(np.random.default_rng(0))
    before = table.flat_token_ids.clone().view(MAX_NUM_SEQS, -1)
    tokens = int32([7, 8, 9])
    table.update(
        make_batch(
            [2], [0], [3], [True], new_rows=(new_row(2, tokens),),
            block_rows=int32([2]), block_indices=int32([1]), block_ids=int32([99]),
        )
    )  # fmt: skip
    tokens[:] = 0  # the table keeps its own copy
    after = table.flat_token_ids.view(MAX_NUM_SEQS, -1)
    assert after[2, :3].tolist() == [7, 8, 9]
    assert torch.equal(after[:2], before[:2])
    assert torch.equal(after[3:], before[3:])
    assert table.host_inputs(make_batch([2], [69], [1], [True])).block_tables.tolist() == [
        [blocks[2, 0], 99, *blocks[2, 2:].tolist()]
    ]


def test_staging_keeps_groups_apart() -> None:
    first = [np.arange(3), np.ones((2, 2), dtype=np.float32)]
    staged = Staging(CPU).to_device([first, None, [np.array([True])]])
    assert [len(group) for group in staged] == [2, 0, 1]
    assert staged[0][1].shape == (2, 2)
    assert staged[2][0].dtype == torch.bool
