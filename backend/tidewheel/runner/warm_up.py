"""Synthetic steps that compile kernels before the first request.

triton-lang compiles a kernel for each combination of constants, argument types, and whether integers are 1 or
multiples of 16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tidewheel.batch import NO_TRANSFERS, Int32Array, NewRow, ScheduledBatch
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import Progress
from tidewheel.request import Request
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.profiling import StepSize, largest_step
from tidewheel.sampling import SamplingParams

STAGE = "kernels"
GROWTH = 4


class WarmUpRow(NamedTuple):
    context: int
    num_tokens: int
    sampling: SamplingParams
    bad_words_ids: tuple[tuple[int, ...], ...] = ()


Settings = dict[str, Any]  # arguments of `SamplingParams`

# Every sampling stage: no request takes more memory.
EVERY_STAGE = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=5,
    prompt_logprobs=5,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0)
GREEDILY: Settings = {"temperature": 0.0}
DRAWN: Settings = {"temperature": 1.0}
FILTERS: tuple[Settings, ...] = ({"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05})
CHANGES: tuple[Settings, ...] = ({"logit_bias": {0: 1.0}}, {"repetition_penalty": 1.1}, {"logprobs": 1})


def warm_up(info: RunnerInfo, run: Callable[[ScheduledBatch], object], progress: Progress) -> None:
    """Raise `ConfigError` if the cache leaves too little memory."""
    batches = list(warm_up_batches(info))
    try:
        for done, batch in enumerate(batches):
            progress(STAGE, done / len(batches))
            run(batch)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"the GPU has no room for a step of {batch.num_tokens} tokens beside weights and cache: lower "
            "gpu_memory_utilization, kv_cache_memory_mb, num_blocks or max_num_batched_tokens"
        ) from None
    progress(STAGE, 1.0)


def warm_up_batches(info: RunnerInfo) -> Iterator[ScheduledBatch]:
    yield demanding_batch(largest_step(info), info.block_size)
    longest = min(info.max_num_batched_tokens, info.max_model_len)
    prefills = [[WarmUpRow(0, count, GREEDY)] for count in _sizes(longest)]
    steps = [*_decodes(info), *prefills, *_mixed(info), *_sampled()]
    for step_id, rows in enumerate(steps, 1):
        yield _batch(step_id, rows, info.block_size)
    yield from _moved(1 + len(steps), info)


def demanding_batch(size: StepSize, block_size: int) -> ScheduledBatch:
    return _batch(0, [WarmUpRow(0, size.tokens_per_row, EVERY_STAGE)] * size.num_rows, block_size)


def _decodes(info: RunnerInfo) -> Iterator[list[WarmUpRow]]:
    num_tokens = info.num_blocks * info.block_size
    for num_rows in _sizes(largest_step(info).num_rows):
        for length in _sizes(min(info.max_model_len, max(num_tokens // num_rows, 1))):
            yield [WarmUpRow(length - 1, 1, GREEDY)] * num_rows


def _mixed(info: RunnerInfo) -> Iterator[list[WarmUpRow]]:
    if largest_step(info).num_rows < 2 or info.max_model_len < 2:
        return
    for count in _sizes(min(info.max_num_batched_tokens, info.max_model_len) - 1):
        yield [WarmUpRow(1, 1, GREEDY), WarmUpRow(info.max_model_len - count, count, GREEDY)]


def _sampled() -> Iterator[list[WarmUpRow]]:
    ways = [GREEDILY, *(DRAWN | filters for filters in _combinations(FILTERS))]
    for way, changes in itertools.product(ways, _combinations(CHANGES)):
        yield [WarmUpRow(0, 1, SamplingParams(**way, **changes))]
    yield [WarmUpRow(0, 1, GREEDY, bad_words_ids=((0, 1),))]
    # Grammars mask by the same kernel.
    yield [WarmUpRow(0, 1, SamplingParams(**GREEDILY, allowed_token_ids=(0,)))]


def _combinations(options: Sequence[Settings]) -> list[Settings]:
    chosen = itertools.chain.from_iterable(itertools.combinations(options, n) for n in range(len(options) + 1))
    return [{key: value for option in group for key, value in option.items()} for group in chosen]


def _moved(step_id: int, info: RunnerInfo) -> Iterator[ScheduledBatch]:
    first, last = _ids(0), _ids(info.num_blocks - 1)
    rows = [WarmUpRow(0, 1, GREEDY)]
    yield _batch(step_id, rows, info.block_size, copy_sources=first, copy_targets=last)
    if info.num_host_blocks:
        yield _batch(step_id + 1, rows, info.block_size, swap_out_blocks=last, swap_out_slots=first)
        yield _batch(step_id + 2, rows, info.block_size, swap_in_slots=first, swap_in_blocks=last)


def _sizes(largest: int) -> Iterator[int]:
    size = 1
    while size < largest:
        yield size
        size *= GROWTH
    yield largest


def _batch(step_id: int, rows: Sequence[WarmUpRow], block_size: int, **moves: Int32Array) -> ScheduledBatch:
    num_blocks = [-(-(row.context + row.num_tokens) // block_size) for row in rows]
    block_ids = np.concatenate([np.arange(count, dtype=np.int32) for count in num_blocks])
    return sampling_batch(
        range(len(rows)),
        [row.context for row in rows],
        [row.num_tokens for row in rows],
        step_id=step_id,
        new_rows=tuple(_new_row(i, row) for i, row in enumerate(rows)),
        block_rows=np.repeat(np.arange(len(rows), dtype=np.int32), num_blocks),
        block_indices=block_ids,
        block_ids=block_ids,
        transfers=NO_TRANSFERS._replace(**moves),
    )


def sampling_batch(
    rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], *, step_id: int = 0, **columns: Any
) -> ScheduledBatch:
    num_tokens = np.array(counts, dtype=np.int32)
    return ScheduledBatch(
        step_id=step_id,
        rows=np.array(rows, dtype=np.int32),
        start_positions=np.array(starts, dtype=np.int32),
        num_scheduled_tokens=num_tokens,
        samples=np.ones(len(rows), dtype=np.bool_),
        num_decodes=int(np.cumprod(num_tokens == 1).sum()),
        num_tokens=int(num_tokens.sum()),
        **columns,
    )


def _new_row(index: int, row: WarmUpRow) -> NewRow:
    prompt = np.zeros(row.context + row.num_tokens, dtype=np.int32)
    request = Request(
        "", prompt, row.sampling, max_tokens=1, arrival_time=0.0, seed=index, bad_words_ids=row.bad_words_ids
    )
    return NewRow(index, request, prompt[: row.num_tokens], row.sampling)  # stale context tokens do


def _ids(block_id: int) -> Int32Array:
    return np.array([block_id], dtype=np.int32)
