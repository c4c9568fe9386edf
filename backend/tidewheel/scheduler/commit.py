"""What the answer to a batch changes: tokens, hashes, ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tidewheel.batch import BoolArray, Int32Array, SampledTokens, ScheduledBatch, StepOutputs, TopLogprobs
from tidewheel.errors import InternalError, NumericError
from tidewheel.request import FinishReason, Request
from tidewheel.scheduler.columns import Columns, Int64Array, RowArray
from tidewheel.scheduler.state import State


class InFlight(NamedTuple):
    """What the scheduler remembers of a batch until it is applied."""

    step_id: int
    rows: RowArray  # [n]
    epochs: Int64Array  # [n] of these rows when the batch was scheduled


class Endings(NamedTuple):
    """Per sampling row: does it end with its newest token."""

    by_stop: BoolArray
    by_length: BoolArray  # and not by stop


def check_answer(batch: ScheduledBatch, sampled: SampledTokens) -> None:
    """Raises `InternalError` unless the runner answered this batch, with a token for each row that samples."""
    if sampled.step_id != batch.step_id or len(sampled.token_ids) != len(batch.rows):
        raise InternalError(
            f"step {batch.step_id} with {len(batch.rows)} rows was answered with "
            f"{len(sampled.token_ids)} tokens of step {sampled.step_id}"
        )
    missing = batch.samples & (sampled.token_ids < 0)
    if np.count_nonzero(missing) and (sampled.token_ids[missing] != SampledTokens.NOT_FINITE).any():
        raise InternalError(f"step {batch.step_id}: no token for some of rows {batch.rows[missing].tolist()}")


def commit_step(
    state: State, batch: ScheduledBatch, step: InFlight, sampled: SampledTokens, now: float
) -> StepOutputs:
    """Rows that changed hands since the batch was scheduled are skipped."""
    failed = _fail_not_finite(state, step, sampled)
    live = (state.columns.epochs.take(step.rows) == step.epochs).nonzero()[0]
    _commit_computed(state, batch, step.rows, live)
    sampling = live[batch.samples[live]]
    rows, tokens = step.rows[sampling], sampled.token_ids[sampling]
    token_ids: list[int] = tokens.tolist()
    requests = _append_tokens(state.columns, rows, token_ids, now)
    finished = _finish(state, requests, token_ids, find_endings(state.columns, rows, tokens))
    return StepOutputs(requests, token_ids, _select(sampled.logprobs, sampling), failed + finished)


def find_endings(columns: Columns, rows: RowArray, token_ids: Int32Array) -> Endings:
    """`num_tokens` counts the new tokens already.

    The sampler masks stop ids until `min_tokens` are there; the check here only guards against one that does not.
    """
    num_tokens = columns.num_tokens.take(rows)
    is_stop = np.logical_or.reduce(columns.stop_token_ids.take(rows, axis=1) == token_ids)
    by_stop = is_stop & (num_tokens >= columns.min_num_tokens.take(rows))
    return Endings(by_stop, (num_tokens >= columns.max_num_tokens.take(rows)) & ~by_stop)


def _fail_not_finite(state: State, step: InFlight, sampled: SampledTokens) -> list[Request]:
    """Ends the requests whose logits were not finite; what they hold in the cache is not to be trusted."""
    failed = []
    for index in (sampled.token_ids == SampledTokens.NOT_FINITE).nonzero()[0].tolist():
        row = int(step.rows[index])
        if state.columns.epochs[row] != step.epochs[index]:
            continue
        request = state.columns.request(row)
        request.error = NumericError(
            f"the model's logits were not finite after {request.num_tokens} tokens; only this request is affected"
        )
        state.kv.forget(row)
        state.end(request, FinishReason.ERROR)
        failed.append(request)
    return failed


def _commit_computed(state: State, batch: ScheduledBatch, rows: RowArray, live: RowArray) -> None:
    columns, block_size = state.columns, state.kv.block_size
    rows, starts, counts = rows[live], batch.start_positions[live], batch.num_scheduled_tokens[live]
    ends = starts + counts
    columns.num_computed_tokens[rows] = ends
    columns.num_inflight_tokens[rows] -= counts
    filled = ends // block_size > starts // block_size
    rows, ends = rows[filled], ends[filled]
    for row, request, end in zip(rows.tolist(), columns.requests(rows), ends.tolist(), strict=True):
        state.kv.commit(row, request, end)


def _append_tokens(columns: Columns, rows: RowArray, token_ids: list[int], now: float) -> list[Request]:
    num_tokens = columns.num_tokens.take(rows) + 1
    columns.num_tokens[rows] = num_tokens
    columns.num_inflight_samples[rows] -= 1
    requests = columns.requests(rows)
    for request, token_id in zip(requests, token_ids, strict=True):
        request.output_token_ids.append(token_id)
        request.last_token_time = now
    for index in (num_tokens == columns.num_prompt_tokens.take(rows) + 1).nonzero()[0].tolist():
        requests[index].first_token_time = now
    return requests


def _finish(state: State, requests: list[Request], token_ids: list[int], endings: Endings) -> list[Request]:
    finished = []
    for index in (endings.by_stop | endings.by_length).nonzero()[0].tolist():
        request = requests[index]
        if endings.by_stop[index]:
            request.stop_reason = token_ids[index]
        state.end(request, FinishReason.STOP if endings.by_stop[index] else FinishReason.LENGTH)
        finished.append(request)
    return finished


def _select(logprobs: dict[int, TopLogprobs] | None, sampling: RowArray) -> dict[int, TopLogprobs] | None:
    """By position in `sampling` instead of index into the batch."""
    if not logprobs:
        return None
    return {index: logprobs[source] for index, source in enumerate(sampling.tolist()) if source in logprobs}
