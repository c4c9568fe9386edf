"""What the answer to a batch changes: tokens, hashes, ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tidewheel.batch import BoolArray, Int32Array, SampledTokens, ScheduledBatch, StepOutputs, TopLogprobs
from tidewheel.errors import InternalError, NumericError
from tidewheel.request import FinishReason, Request
from tidewheel.scheduler.columns import Columns, Int64Array, RowArray
from tidewheel.scheduler.fairness import VirtualCounters
from tidewheel.scheduler.state import State


class InFlight(NamedTuple):
    """What the scheduler remembers of a batch until it is applied."""

    step_id: int
    rows: RowArray  # [n]
    epochs: Int64Array  # [n] of these rows when the batch was scheduled
    scheduled_at: float  # seconds
    num_started_tokens: int  # prompt tokens of the requests that started with it
    oldest_start: float | None  # first arrival of those; None: nobody started


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
    ended = _fail_not_finite(state, step, sampled, now)
    live = state.columns.epochs.take(step.rows) == step.epochs
    _commit_computed(state, batch, step.rows, live)
    sampling = live & batch.samples
    rows, tokens = step.rows[sampling], sampled.token_ids[sampling]
    token_ids: list[int] = tokens.tolist()
    requests = state.columns.append_tokens(rows, tokens, now)
    state.columns.write_back_some(batch.step_id)
    if state.virtual_counters is not None:
        _charge_outputs(state.virtual_counters, state.columns, rows)
    for index, reason in find_endings(state.columns, rows, tokens):
        request = requests[index]
        request.stop_reason = token_ids[index] if reason is FinishReason.STOP else None
        state.end(request, reason, now)
        ended.append(request)
    return StepOutputs(requests, token_ids, _select(sampled.logprobs, sampling), ended)


def _fail_not_finite(state: State, step: InFlight, sampled: SampledTokens, now: float) -> list[Request]:
    """Ends the requests whose logits were not finite; what they hold in the cache is not to be trusted."""
    failed = []
    for index in (sampled.token_ids == SampledTokens.NOT_FINITE).nonzero()[0].tolist():
        row = int(step.rows[index])
        if state.columns.epochs[row] != step.epochs[index]:
            continue
        request = state.columns.write_back(row)
        request.error = NumericError(
            f"the model's logits were not finite after {request.num_tokens} tokens; only this request is affected"
        )
        state.end(request, FinishReason.ERROR, now, keep_cached=False)
        failed.append(request)
    return failed


def _commit_computed(state: State, batch: ScheduledBatch, rows: RowArray, live: BoolArray) -> None:
    """Note what the batch has computed. Blocks of tokens that a row entered with can be found from then on.

    Blocks that decoding fills are hashed when the request leaves its row: no other request wants them earlier.
    """
    columns = state.columns
    rows, starts, counts = rows[live], batch.start_positions[live], batch.num_scheduled_tokens[live]
    ends = starts + counts
    columns.num_computed_tokens[rows] = ends
    columns.num_inflight_tokens[rows] -= counts
    for index in (starts < columns.num_entered_tokens.take(rows)).nonzero()[0].tolist():
        row = int(rows[index])
        state.kv.commit(row, columns.request(row), int(ends[index]))


def _charge_outputs(counters: VirtualCounters, columns: Columns, rows: RowArray) -> None:
    """One token for each row, summed by tenant."""
    num_tokens = np.bincount(columns.tenant_ids.take(rows))
    for tenant_id in num_tokens.nonzero()[0].tolist():
        counters.charge(columns.tenants.names[tenant_id], 0, int(num_tokens[tenant_id]))


def find_endings(columns: Columns, rows: RowArray, tokens: Int32Array) -> list[tuple[int, FinishReason]]:
    """Which of the rows end with their newest token, by index.

    The sampler masks stop ids until `min_tokens` are there; the check here only guards against one that does not.
    """
    num_tokens = columns.num_tokens.take(rows)
    is_stop = np.logical_or.reduce(columns.stop_token_ids.take(rows, axis=1) == tokens)
    is_last = num_tokens >= columns.max_num_tokens.take(rows)
    endings = []
    for index in (is_stop | is_last).nonzero()[0].tolist():
        if is_stop[index] and num_tokens[index] >= columns.min_num_tokens[rows[index]]:
            endings.append((index, FinishReason.STOP))
        elif is_last[index]:
            endings.append((index, FinishReason.LENGTH))
    return endings


def _select(logprobs: dict[int, TopLogprobs] | None, sampling: BoolArray) -> dict[int, TopLogprobs] | None:
    """By position among the rows that sample instead of index into the batch."""
    if not logprobs:
        return None
    sources = sampling.nonzero()[0].tolist()
    return {index: logprobs[source] for index, source in enumerate(sources) if source in logprobs}
