"""Plan that splits the keys of decodes among a fixed number of programs, longest sequences first.

A kernel makes the plan on the device, once for all layers: a CUDA graph freezes programs, not lengths.

How a decode's keys are split depends on the number and the lengths of all decodes of the step, drafted tokens too. So
does the rounding of its result; the result without splits, and that of `invariant` attention, depend on no other row.
"""

from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl

from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.launch_config import DecodeSplits, cdiv, splits_none
from tidewheel_kernels.triton_launch import MAX_LAUNCHES, KernelLauncher

FIELDS = tl.constexpr(4)  # 16 bytes
BLOCK_SEQS, BLOCK_OTHERS = 128, 32


class SplitPlan(NamedTuple):
    programs: torch.Tensor  # [num_seqs + extra, 4] int32: sequence, first tile, end, its splits or 0
    merges: torch.Tensor  # [extra, 4] int32: sequence, its first program, its splits (below 2: none)


@triton.jit
def visible_tiles(seq_len, sliding_window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return (first, end) of the key tiles that a sequence's last token attends to."""
    first = seq_len * 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - sliding_window, 0) // BLOCK_N
    return first, tl.cdiv(seq_len, BLOCK_N)


@triton.jit
def _load_tiles(
    seq_lens_ptr, seq, num_seqs, sliding_window, per_split, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    seq_len = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0)
    first, end = visible_tiles(seq_len, sliding_window, BLOCK_N, HAS_WINDOW)
    num_tiles = end - first
    # Equal shares, none empty.
    per_program = tl.maximum(tl.cdiv(num_tiles, tl.maximum(tl.cdiv(num_tiles, per_split), 1)), 1)
    num_splits = tl.where(seq < num_seqs, tl.maximum(tl.cdiv(num_tiles, per_program), 1), 0)
    return first, num_tiles, per_program, num_splits


@triton.jit
def _places(
    seq_lens_ptr,
    seq,
    num_tiles,
    num_seqs,
    sliding_window,
    per_split,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
):
    rank = tl.zeros([BLOCK_SEQS], dtype=tl.int32)
    place = tl.zeros([BLOCK_SEQS], dtype=tl.int32)
    num_programs = 0
    for chunk in range(0, num_seqs, BLOCK_OTHERS):
        other = chunk + tl.arange(0, BLOCK_OTHERS)
        _, other_tiles, _, other_splits = _load_tiles(
            seq_lens_ptr, other, num_seqs, sliding_window, per_split, BLOCK_N, HAS_WINDOW
        )
        is_longer = other_tiles[None, :] > num_tiles[:, None]
        is_earlier = (other_tiles[None, :] == num_tiles[:, None]) & (other[None, :] < seq[:, None])
        is_before = (is_longer | is_earlier) & (other < num_seqs)[None, :]
        rank += tl.sum(is_before.to(tl.int32), axis=1)
        place += tl.sum(tl.where(is_before, other_splits[None, :], 0), axis=1)
        num_programs += tl.sum(other_splits, axis=0)
    return rank, place, num_programs


@triton.jit
def _store_programs(programs_ptr, place, seq, first, num_tiles, per_program, num_splits):
    for split in range(tl.max(num_splits, axis=0)):
        row_ptr = programs_ptr + (place + split) * FIELDS
        begin = first + split * per_program
        mask = split < num_splits
        tl.store(row_ptr, seq, mask=mask)
        tl.store(row_ptr + 1, begin, mask=mask)
        tl.store(row_ptr + 2, tl.minimum(begin + per_program, first + num_tiles), mask=mask)
        tl.store(row_ptr + 3, num_splits, mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "extra", "min_tiles"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def plan_splits_kernel(
    seq_lens_ptr,  # [num_seqs]
    programs_ptr,  # [num_seqs + extra, FIELDS]
    merges_ptr,  # [extra, FIELDS]
    num_seqs,
    extra,
    min_tiles,
    sliding_window,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
):
    # grid: [cdiv(num_seqs, BLOCK_SEQS)]
    total = 0
    for chunk in range(0, num_seqs, BLOCK_SEQS):
        every = chunk + tl.arange(0, BLOCK_SEQS)
        _, num_tiles, _, _ = _load_tiles(seq_lens_ptr, every, num_seqs, sliding_window, 1, BLOCK_N, HAS_WINDOW)
        total += tl.sum(num_tiles, axis=0)
    # At most num_seqs + extra splits are longer than total / extra.
    per_split = tl.maximum(tl.cdiv(total, extra), min_tiles)

    seq = tl.program_id(0) * BLOCK_SEQS + tl.arange(0, BLOCK_SEQS)
    first, num_tiles, per_program, num_splits = _load_tiles(
        seq_lens_ptr, seq, num_seqs, sliding_window, per_split, BLOCK_N, HAS_WINDOW
    )
    rank, place, num_programs = _places(
        seq_lens_ptr, seq, num_tiles, num_seqs, sliding_window, per_split,
        BLOCK_N, HAS_WINDOW, BLOCK_SEQS, BLOCK_OTHERS,
    )  # fmt: skip
    _store_programs(programs_ptr, place, seq, first, num_tiles, per_program, num_splits)
    merge_ptr = merges_ptr + rank * FIELDS
    is_merged = (rank < extra) & (seq < num_seqs)
    tl.store(merge_ptr, seq, mask=is_merged)
    tl.store(merge_ptr + 1, place, mask=is_merged)
    tl.store(merge_ptr + 2, num_splits, mask=is_merged)
    if tl.program_id(0) == 0:
        for chunk in range(0, extra, BLOCK_SEQS):
            spare = chunk + tl.arange(0, BLOCK_SEQS)
            # Programs read their sequence's length first.
            row_ptr = programs_ptr + (num_programs + spare) * FIELDS
            is_spare = num_programs + spare < num_seqs + extra
            tl.store(row_ptr, 0, mask=is_spare)
            tl.store(row_ptr + 3, 0, mask=is_spare)
            tl.store(merges_ptr + spare * FIELDS + 2, 0, mask=(spare >= num_seqs) & (spare < extra))


# By limits, tile and window; once per `AttentionMetadata`.
_plans: WeakKeyDictionary[AttentionMetadata, dict[tuple[object, ...], SplitPlan | None]] = WeakKeyDictionary()


@lru_cache(MAX_LAUNCHES)
def _planner(block_n: int, sliding_window: int) -> KernelLauncher:
    constants = {
        "sliding_window": sliding_window,
        "HAS_WINDOW": sliding_window > 0,
        "BLOCK_N": block_n,
        "BLOCK_SEQS": BLOCK_SEQS,
        "BLOCK_OTHERS": BLOCK_OTHERS,
    }
    return KernelLauncher(plan_splits_kernel, constants, num_warps=4)


def split_plan(meta: AttentionMetadata, limits: DecodeSplits, block_n: int, sliding_window: int) -> SplitPlan | None:
    """Return the plan, made on the device at the first layer; None if nothing is split."""
    if limits.extra == 0:
        return None
    plans = _plans.get(meta)
    if plans is None:
        plans = _plans[meta] = {}
    key = limits, block_n, sliding_window
    if key not in plans:
        plans[key] = _planned(meta, limits, block_n, sliding_window) if _may_split(meta, limits) else None
    return plans[key]


def _may_split(meta: AttentionMetadata, limits: DecodeSplits) -> bool:
    if meta.seq_lens_cpu is None:
        return meta.may_split
    return meta.may_split and not splits_none(meta.seq_lens_cpu[: meta.num_decodes], limits)


def _planned(meta: AttentionMetadata, limits: DecodeSplits, block_n: int, sliding_window: int) -> SplitPlan:
    num_seqs, extra = meta.num_decodes, limits.extra
    rows = torch.empty((num_seqs + 2 * extra, FIELDS.value), dtype=torch.int32, device=meta.seq_lens.device)
    plan = SplitPlan(rows[: num_seqs + extra], rows[num_seqs + extra :])
    min_tiles = cdiv(limits.min_keys, block_n)
    tensors = (meta.seq_lens, *plan)
    _planner(block_n, sliding_window)((cdiv(num_seqs, BLOCK_SEQS), 1, 1), tensors, num_seqs, extra, min_tiles)
    return plan
