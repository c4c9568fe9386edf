"""What the answer to a batch changes: tokens, hashes, ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tidewheel.batch import BoolArray, Int32Array, SampledTokens, ScheduledBatch, StepOutputs, TopLogprobs
from tidewheel.errors import InternalError, NumericError
from tidewheel.request import FinishReason, Request
from tidewheel.scheduler.columns import Columns, Int64Array
from tidewheel.scheduler.state import State


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
    missing = batch.samples & (sampled.token_ids < 0) & (sampled.token_ids != SampledTokens.NOT_FINITE)
    if missing.any():
        raise InternalError(f"step {batch.step_id}: no token for rows {batch.rows[missing].tolist()}")


def commit_step(
    state: State, batch: ScheduledBatch, epochs: Int64Array, sampled: SampledTokens, now: float
) -> StepOutputs:
    """`epochs` are those of the batch's rows when it was scheduled: rows that changed hands are skipped."""
    failed = _fail_not_finite(state, batch, epochs, sampled)
    live = np.flatnonzero(state.columns.epochs[batch.rows] == epochs)
    sampling = live[batch.samples[live]]
    rows, token_ids = batch.rows[sampling], sampled.token_ids[sampling]
    _commit_computed(state, batch, live)
    requests = _append_tokens(state.columns, rows, token_ids, now)
    finished = _finish(state, requests, token_ids, find_endings(state.columns, rows, token_ids))
    return StepOutputs(requests, token_ids.tolist(), _select(sampled.logprobs, sampling), failed + finished)


def find_endings(columns: Columns, rows: Int32Array, token_ids: Int32Array) -> Endings:
    """`num_tokens` counts the new tokens already.

    The sampler masks stop ids until `min_tokens` are there; the check here only guards against one that does not.
    """
    num_tokens = columns.num_tokens[rows]
    is_stop = (columns.stop_token_ids[rows] == token_ids[:, None]).any(axis=1)
    by_stop = is_stop & (num_tokens >= columns.min_num_tokens[rows])
    return Endings(by_stop, (num_tokens >= columns.max_num_tokens[rows]) & ~by_stop)


def _fail_not_finite(
    state: State, batch: ScheduledBatch, epochs: Int64Array, sampled: SampledTokens
) -> list[Request]:
    """Ends the requests whose logits were not finite; what they hold in the cache is not to be trusted."""
    failed = []
    for index in np.flatnonzero(sampled.token_ids == SampledTokens.NOT_FINITE).tolist():
        row = int(batch.rows[index])
        if state.columns.epochs[row] != epochs[index]:
            continue
        request = state.columns.request(row)
        request.error = NumericError(
            f"the model's logits were not finite after {request.num_tokens} tokens; only this request is affected"
        )
        state.kv.forget(row)
        state.end(request, FinishReason.ERROR)
        failed.append(request)
    return failed


def _commit_computed(state: State, batch: ScheduledBatch, live: Int64Array) -> None:
    columns, block_size = state.columns, state.kv.block_size
    rows, starts, counts = batch.rows[live], batch.start_positions[live], batch.num_scheduled_tokens[live]
    ends = starts + counts
    columns.num_computed_tokens[rows] = ends
    columns.num_inflight_tokens[rows] -= counts
    filled = ends // block_size > starts // block_size
    for row, end in zip(rows[filled].tolist(), ends[filled].tolist(), strict=True):
        state.kv.commit(row, columns.request(row), end)


def _append_tokens(columns: Columns, rows: Int32Array, token_ids: Int32Array, now: float) -> list[Request]:
    columns.num_tokens[rows] += 1
    columns.num_inflight_samples[rows] -= 1
    requests = columns.requests(rows)
    for request, token_id in zip(requests, token_ids.tolist(), strict=True):
        request.output_token_ids.append(token_id)
        request.last_token_time = now
    is_first = columns.num_tokens[rows] == columns.num_prompt_tokens[rows] + 1
    for index in np.flatnonzero(is_first).tolist():
        requests[index].first_token_time = now
    return requests


def _finish(state: State, requests: list[Request], token_ids: Int32Array, endings: Endings) -> list[Request]:
    finished = []
    for index in np.flatnonzero(endings.by_stop | endings.by_length).tolist():
        request = requests[index]
        if endings.by_stop[index]:
            request.stop_reason = int(token_ids[index])
        state.end(request, FinishReason.STOP if endings.by_stop[index] else FinishReason.LENGTH)
        finished.append(request)
    return finished


def _select(logprobs: dict[int, TopLogprobs] | None, sampling: Int64Array) -> dict[int, TopLogprobs] | None:
    """By position in `sampling` instead of index into the batch."""
    if not logprobs:
        return None
    return {index: logprobs[source] for index, source in enumerate(sampling.tolist()) if source in logprobs}
