"""Keys of decodes are shared out by their real lengths, within limits that a CUDA graph may freeze."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from support.kernels.kernel_harness import paged_batch
from tidewheel_kernels import AttentionMetadata
from tidewheel_kernels.attention import triton_decode, triton_splits
from tidewheel_kernels.attention.reference import paged_attention_reference
from tidewheel_kernels.attention.triton_kernels import paged_attention
from tidewheel_kernels.attention.triton_splits import split_plan
from tidewheel_kernels.launch_config import DecodeSplits, cdiv, decode_splits, splits_none

BLOCK_N = 64
Row = tuple[int, int, int, int]


def planned(lengths: list[int], limits: DecodeSplits, device: str, window: int = 0) -> tuple[list[Row], list[Row]]:
    """Return the plan's rows, without fields that nobody reads."""
    meta = paged_batch([(1, length) for length in lengths], num_kv_heads=1, head_dim=8, device=device).meta
    plan = split_plan(meta, limits, BLOCK_N, window)
    assert plan is not None
    assert split_plan(meta, limits, BLOCK_N, window) is plan  # for the next layer
    programs, merges = (rows.tolist() for rows in plan)
    return (
        [row if row[3] else [0, 0, 0, 0] for row in programs],
        [[*row[:3], 0] if row[2] > 1 else [0, 0, 0, 0] for row in merges],
    )


def reference(lengths: list[int], limits: DecodeSplits, window: int = 0) -> tuple[list[Row], list[Row]]:
    first = [max(length - window, 0) // BLOCK_N if window else 0 for length in lengths]
    tiles = [cdiv(length, BLOCK_N) - begin for length, begin in zip(lengths, first, strict=True)]
    per_split = max(cdiv(sum(tiles), limits.extra), cdiv(limits.min_keys, BLOCK_N))
    programs: list[list[int]] = []
    merges = []
    for seq in sorted(range(len(lengths)), key=lambda i: -tiles[i]):
        share = max(cdiv(tiles[seq], max(cdiv(tiles[seq], per_split), 1)), 1)
        begins = range(first[seq], first[seq] + max(tiles[seq], 1), share)
        if len(begins) > 1:
            merges.append([seq, len(programs), len(begins), 0])
        programs += [[seq, begin, min(begin + share, first[seq] + tiles[seq]), len(begins)] for begin in begins]
    none = [0, 0, 0, 0]
    programs += [none] * (len(lengths) + limits.extra - len(programs))
    return programs, merges + [none] * (limits.extra - len(merges))


@pytest.mark.parametrize(
    ("num_seqs", "longest", "window", "limits"),
    [
        (1, 0, 0, DecodeSplits(3, 128)),
        (1, 5000, 0, decode_splits(1, 8, 40_960, 132)),
        (5, 5000, 0, DecodeSplits(7, 200)),
        (5, 5000, 1000, DecodeSplits(7, 200)),
        (5, 64, 0, DecodeSplits(140, 64)),
        (140, 9000, 0, decode_splits(140, 8, 40_960, 132)),  # more than a program of the planner takes
    ],
)
def test_the_plan_is_that_of_the_reference(
    device: str, num_seqs: int, longest: int, window: int, limits: DecodeSplits
) -> None:
    draw = random.Random(num_seqs + window)
    lengths = [draw.choice((0, 1, 64, draw.randint(0, longest))) for _ in range(num_seqs)]
    assert planned(lengths, limits, device, window) == reference(lengths, limits, window), lengths


def test_one_long_sequence_among_many_short_ones_is_shared_first(device: str) -> None:
    lengths = [512] * 40 + [32_768] + [512] * 23
    programs, merges = planned(lengths, decode_splits(64, 8, 40_960, 132), device)
    longest = max(end - begin for _, begin, end, _ in programs)
    assert longest * BLOCK_N <= 2048  # a sixteenth
    assert [row[0] for row in programs[:16]] == [40] * 16 and merges[0] == [40, 0, 16, 0]
    assert sorted(row[0] for row in programs[16:79]) == [seq for seq in range(64) if seq != 40]


def test_splits_of_many_are_merged(device: str) -> None:
    """Sequences that fill the device alone, with some long ones of which a program takes 1,024 keys."""
    lengths = [30] * 6 + [1100] * 2 + [0, 1, 17, 64]
    batch = paged_batch([(1, length) for length in lengths], num_kv_heads=1, head_dim=8, block_size=64, device=device)
    limits = decode_splits(len(lengths), 2, 1100, 8)
    assert limits == DecodeSplits(6, 1024)
    ours, expected = torch.empty_like(batch.q), torch.empty_like(batch.q)
    arguments = batch.q, batch.k_cache, batch.v_cache, batch.meta
    paged_attention(*arguments, ours, 0.2, 0, 0.0, None)
    paged_attention_reference(*arguments, expected, 0.2, 0, 0.0, None)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [0, 300])
def test_lengths_that_are_none_split_for_the_host_are_so_for_the_device(window: int) -> None:
    draw, num_unsplit = random.Random(window), 0
    for _ in range(3000):
        lengths = [draw.choice((64, 512, 1024, draw.randint(1, 2500))) for _ in range(draw.choice((1, 3, 40, 130)))]
        limits = DecodeSplits(draw.randint(1, 40), draw.choice((128, 1024)))
        if splits_none(np.array(lengths, dtype=np.int32), limits):
            num_unsplit += 1
            _, merges = reference(lengths, limits, window)
            assert not any(num_splits for _, _, num_splits, _ in merges), (lengths, limits)
    assert num_unsplit > 300


def test_one_long_sequence_is_split_as_the_host_says() -> None:
    limits, even = decode_splits(64, 8, 40_960, 132), np.full(64, 2048, dtype=np.int32)
    assert splits_none(even, limits) and splits_none(np.append(even[1:], np.int32(4096)), limits)
    assert not splits_none(np.append(even[1:], np.int32(4200)), limits)
    assert splits_none(np.append(np.full(63, 10, dtype=np.int32), np.int32(1024)), limits)  # the merge costs too much


@pytest.mark.parametrize("known", ["lengths", "nothing", "no split wanted"])
def test_decodes_that_are_not_split_have_no_plan_and_no_merge(
    known: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_decode, "decode_splits", lambda *_: DecodeSplits(4, 128))
    lengths = [700] * 8 if known == "lengths" else [700] * 7 + [1700]
    batch = paged_batch([(1, length) for length in lengths], num_kv_heads=1, head_dim=8, block_size=64, device=device)
    host = np.array(lengths, dtype=np.int32) if known == "lengths" else None
    meta = replace(batch.meta, seq_lens_cpu=host, may_split=known != "no split wanted")
    ours, expected = torch.empty_like(batch.q), torch.empty_like(batch.q)
    with mock.patch.object(triton_splits, "_planned", wraps=triton_splits._planned) as planned:
        paged_attention(batch.q, batch.k_cache, batch.v_cache, meta, ours, 0.2, 0, 0.0, None)
    assert planned.called == (known == "nothing")
    paged_attention_reference(batch.q, batch.k_cache, batch.v_cache, batch.meta, expected, 0.2, 0, 0.0, None)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_prompts_beside_decodes_do_not_count(device: str) -> None:
    """A prompt of any length leaves equal decodes as they are."""
    meta = paged_batch([(1, 300)] * 3 + [(5, 5000)], num_kv_heads=1, head_dim=8, device=device).meta
    limits, host = DecodeSplits(2, 128), meta.seq_lens.cpu().numpy()
    assert split_plan(replace(meta, seq_lens_cpu=host), limits, BLOCK_N, 0) is None
    assert split_plan(meta, limits, BLOCK_N, 0) is not None


def test_other_lengths_get_another_plan(device: str) -> None:
    first = paged_batch([(1, 900)], num_kv_heads=1, head_dim=8, device=device).meta
    longer = AttentionMetadata(**{**vars(first), "seq_lens": first.seq_lens * 2})
    plans = [split_plan(meta, DecodeSplits(4, 128), BLOCK_N, 0) for meta in (first, longer)]
    assert [plan.programs[0].tolist() for plan in plans] == [[0, 0, 4, 4], [0, 0, 8, 4]]
