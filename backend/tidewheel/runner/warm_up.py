"""Synthetic steps: they compile kernels before the first request, and show what steps take.

triton-lang compiles a kernel for each combination of constants, argument types, and whether integers are 1 or
multiples of 16. Memory is measured on a GPU, estimated on a CPU. Graphs point into the cache, so they come after it;
the largest are captured before to estimate all.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from tidewheel.batch import NO_DRAFT, NO_TRANSFERS, SPARE_LOGITS, TO_DRAFT, Int32Array, NewRow, ScheduledBatch, no_ids
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import ModelShape, Progress
from tidewheel.models.trial_prompt import random_tokens
from tidewheel.request import Request
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.sampling_plan import SCORED_AT_ONCE
from tidewheel.sampling import SamplingParams
from tidewheel.settings import MIB

T = TypeVar("T")

STAGE = "kernels"
GROWTH = 4
MEASURED_CONTEXT = 128  # tokens of each measured row
MEASURED_S = 1.0  # for all sizes
LEAST_MEASURED = 8  # entries; larger steps are left out once the time is over
NUM_MEASURED = 5  # steps of each size
TRIAL_LENGTHS, NUM_TRIAL_DECODES = (3, 17, 8, 30), 2


class StepSize(NamedTuple):
    num_rows: int
    tokens_per_row: int


def largest_step(info: RunnerInfo) -> StepSize:
    num_rows = min(info.max_num_seqs, info.max_num_batched_tokens)
    return StepSize(num_rows, max(1, min(info.max_num_batched_tokens // num_rows, info.max_model_len - 1)))


def estimated_activation_bytes(size: StepSize, shape: ModelShape, dtype: torch.dtype) -> int:
    """Return the bytes of the widest tensors: residual, norm, gate, up and product of a layer, and logits twice."""
    per_token = (2 * shape.hidden_size + 3 * shape.intermediate_size) * dtype.itemsize
    num_tokens = size.num_rows * size.tokens_per_row
    per_logit = dtype.itemsize + torch.float32.itemsize
    sampled = size.num_rows * (per_logit + torch.int32.itemsize)
    scored = min(num_tokens, SCORED_AT_ONCE) * per_logit
    return num_tokens * per_token + shape.vocab_size * max(sampled, scored)


def measured_activation_bytes(
    run: Callable[[StepSize], T], size: StepSize, device: torch.device, num_ranks: int
) -> tuple[T, int]:
    """Return `run`'s result and its peak memory in bytes. Raise `ConfigError`, naming settings that fit."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = _run_if_it_fits(run, size)
    if result is None:
        raise ConfigError(_what_fits(run, size, before, num_ranks))
    return result, torch.cuda.max_memory_allocated(device) - before


def _run_if_it_fits(run: Callable[[StepSize], T], size: StepSize) -> T | None:
    try:
        return run(size)
    except torch.OutOfMemoryError:
        return None


def _what_fits(run: Callable[[StepSize], object], size: StepSize, weights_bytes: int, num_ranks: int) -> str:
    obstacle = f"a step of {size.num_rows} requests with {size.tokens_per_row} tokens each does not fit on the GPU"
    beside = f"{obstacle} beside {weights_bytes // MIB} MiB of weights"
    if num_ranks > 1:  # the others are inside this step, and would not take part in a smaller one
        return f"{beside}: lower max_num_batched_tokens or max_num_seqs"
    num_rows, length = size
    while num_rows and _run_if_it_fits(run, StepSize(num_rows, length)) is None:
        num_rows, length = (num_rows, length // 2) if length > 1 else (num_rows // 2, 1)
        torch.cuda.empty_cache()
    if not num_rows:
        return f"{beside}, nor does a step of one token: use a larger GPU, or stop what else runs on it"
    if num_rows < size.num_rows:
        return f"{beside}: set max_num_seqs and max_num_batched_tokens to at most {num_rows}"
    return f"{beside}: set max_num_batched_tokens to at most {num_rows * length}"


def estimated_graph_bytes(taken: Sequence[int], num_sizes: int) -> int:
    """Estimate the bytes of all graphs: the first pays for the pool, the others count as max(`taken[1:]`) each."""
    return sum(taken[:1]) + max(num_sizes - 1, 0) * max(taken[1:], default=0)


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


def warm_up(
    info: RunnerInfo, run: Callable[[ScheduledBatch], object], progress: Progress, *, drafts: bool = False
) -> None:
    """Run steps of all kinds, with `drafts` of the runner's too. Raise `ConfigError` if memory does not suffice."""
    batches = list(warm_up_batches(info, drafts=drafts))
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


def warm_up_batches(info: RunnerInfo, *, drafts: bool = False) -> Iterator[ScheduledBatch]:
    yield demanding_batch(largest_step(info), info.block_size)
    longest = min(info.max_num_batched_tokens, info.max_model_len)
    prefills = [[WarmUpRow(0, count, GREEDY)] for count in _sizes(longest)]
    for rows in (*_decodes(info), *prefills, *_mixed(info), *_sampled()):
        yield _batch(rows, info.block_size)
    yield from _moved(info)
    if drafts and (batch := _decode_batch(info, 3, 1, TO_DRAFT, context=8)) is not None:
        yield from (batch, _again(batch))  # the second time, the draft model has all tokens


def measure_decodes(
    info: RunnerInfo, run: Callable[[ScheduledBatch], object], limit_s: float | None = MEASURED_S
) -> list[tuple[int, float]]:
    """Return the seconds of steps of 1, 2, 4, … decodes: the least of each, as other programs only add to them.

    Without a limit, ranks run the same steps.
    """
    measured: list[tuple[int, float]] = []
    ends_at = math.inf if limit_s is None else time.perf_counter() + limit_s
    num_entries, most = 1, min(info.max_num_seqs + SPARE_LOGITS, info.max_num_batched_tokens)
    while num_entries <= most and (num_entries <= LEAST_MEASURED or time.perf_counter() < ends_at):
        batch = _decode_batch(info, num_entries, min(num_entries, info.max_num_seqs))
        if batch is None:
            break
        run(batch)
        known = _again(batch)
        seconds: list[float] = []
        while not seconds or (len(seconds) < NUM_MEASURED and time.perf_counter() < ends_at):
            before = time.perf_counter()
            run(known)
            seconds.append(time.perf_counter() - before)
        measured.append((num_entries, min(seconds)))
        num_entries *= 2
    largest_first = itertools.accumulate(reversed(measured), lambda larger, size: (size[0], min(size[1], larger[1])))
    return list(largest_first)[::-1]


def _again(batch: ScheduledBatch) -> ScheduledBatch:
    """Return the batch without what it enters."""
    return dataclasses.replace(batch, new_rows=(), block_rows=no_ids(), block_indices=no_ids(), block_ids=no_ids())


def _decode_batch(
    info: RunnerInfo, num_entries: int, num_rows: int, draft: int = 0, *, context: int = MEASURED_CONTEXT
) -> ScheduledBatch | None:
    """Return a step of that many decodes, with drafts if there are fewer rows; None if the context is too short."""
    rows = np.arange(num_entries, dtype=np.int32) * num_rows // num_entries
    places = np.arange(num_entries, dtype=np.int32) - np.searchsorted(rows, rows).astype(np.int32)
    most = int(places.max()) + 1
    context = min(context, min(info.max_model_len, info.num_blocks * info.block_size) - most)
    if context < 0:
        return None
    known = _batch([WarmUpRow(context, most, GREEDY)] * num_rows, info.block_size)
    return sampling_batch(
        rows, context + places, [1] * num_entries, new_rows=known.new_rows, block_rows=known.block_rows,
        block_indices=known.block_indices, block_ids=known.block_ids,
        draft_tokens=np.where(places > 0, draft, NO_DRAFT).astype(np.int32) if most > 1 else no_ids(),
    )  # fmt: skip


def graph_trial(info: RunnerInfo) -> tuple[ScheduledBatch, list[ScheduledBatch]] | None:
    """Return steps that show whether a model supports CUDA graphs, None if they have no room.

    Prompts of several rows come first, in blocks of their own, then decodes of all rows, each at other positions: a
    replay there must give the model's logits.
    """
    most = max(info.max_num_batched_tokens // (1 + NUM_TRIAL_DECODES), 1)
    num_rows = min(len(TRIAL_LENGTHS), info.max_num_seqs, most)
    longest = min(info.max_model_len, info.max_num_batched_tokens // num_rows) - NUM_TRIAL_DECODES
    if longest < 1:
        return None
    lengths = [min(length, longest) for length in TRIAL_LENGTHS[:num_rows]]
    rows = [WarmUpRow(0, length + NUM_TRIAL_DECODES, GREEDY) for length in lengths]
    prompts, tokens = _batch(rows, info.block_size), random_tokens(longest + NUM_TRIAL_DECODES, info.vocab_size)
    known = tokens.numpy().astype(np.int32)
    prompts = dataclasses.replace(
        prompts,
        new_rows=tuple(new._replace(token_ids=known[-len(new.token_ids) :]) for new in prompts.new_rows),
        block_ids=np.arange(len(prompts.block_ids), dtype=np.int32),
    )
    decodes = [
        sampling_batch(range(num_rows), [length + done for length in lengths], [1] * num_rows)
        for done in range(NUM_TRIAL_DECODES)
    ]
    return prompts, decodes


def demanding_batch(size: StepSize, block_size: int) -> ScheduledBatch:
    return _batch([WarmUpRow(0, size.tokens_per_row, EVERY_STAGE)] * size.num_rows, block_size)


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


def _moved(info: RunnerInfo) -> Iterator[ScheduledBatch]:
    first, last = np.array([[0], [info.num_blocks - 1]], dtype=np.int32)
    rows = [WarmUpRow(0, 1, GREEDY)]
    yield _batch(rows, info.block_size, copy_sources=first, copy_targets=last)
    if info.num_host_blocks:
        yield _batch(rows, info.block_size, swap_out_blocks=last, swap_out_slots=first)
        yield _batch(rows, info.block_size, swap_in_slots=first, swap_in_blocks=last)


def _sizes(largest: int) -> Iterator[int]:
    size = 1
    while size < largest:
        yield size
        size *= GROWTH
    yield largest


def _batch(rows: Sequence[WarmUpRow], block_size: int, **moves: Int32Array) -> ScheduledBatch:
    num_blocks = [-(-(row.context + row.num_tokens) // block_size) for row in rows]
    block_ids = np.concatenate([np.arange(count, dtype=np.int32) for count in num_blocks])
    return sampling_batch(
        range(len(rows)),
        [row.context for row in rows],
        [row.num_tokens for row in rows],
        new_rows=tuple(_new_row(i, row) for i, row in enumerate(rows)),
        block_rows=np.repeat(np.arange(len(rows), dtype=np.int32), num_blocks),
        block_indices=block_ids,
        block_ids=block_ids,
        transfers=NO_TRANSFERS._replace(**moves),
    )


def sampling_batch(
    rows: Iterable[int], starts: Iterable[int], counts: Sequence[int], **columns: Any
) -> ScheduledBatch:
    row_ids, positions, num_tokens = (np.fromiter(values, dtype=np.int32) for values in (rows, starts, counts))
    return ScheduledBatch.of(row_ids, positions, num_tokens, np.ones(len(counts), dtype=np.bool_), **columns)


def _new_row(index: int, row: WarmUpRow) -> NewRow:
    prompt = np.zeros(row.context + row.num_tokens, dtype=np.int32)
    request = Request(
        "", prompt, row.sampling, max_tokens=1, arrival_time=0.0, seed=index, bad_words_ids=row.bad_words_ids
    )
    return NewRow(index, request, prompt[: row.num_tokens], row.sampling)  # stale context tokens do
