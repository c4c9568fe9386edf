from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tidewheel.batch import BoolArray, Int32Array, Int64Array, RowArray, SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.errors import InternalError, InvalidRequest, NumericError, TidewheelError
from tidewheel.request import FinishReason, Request
from tidewheel.sampling import TopLogprobs
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.state import SchedulerState
from tidewheel.scheduler.tenancy import VirtualCounters


class InFlightStep(NamedTuple):
    step_id: int
    rows: RowArray  # [n]
    epochs: Int64Array  # [n] at scheduling
    scheduled_at: float  # seconds
    started: list[Request]


def check_answer(batch: ScheduledBatch, sampled: SampledTokens) -> None:
    if sampled.step_id != batch.step_id or len(sampled.token_ids) != len(batch.rows):
        raise InternalError(
            f"step {batch.step_id} with {len(batch.rows)} rows was answered with "
            f"{len(sampled.token_ids)} tokens of step {sampled.step_id}"
        )
    missing = batch.samples & (sampled.token_ids < 0)
    if np.count_nonzero(missing) and (sampled.token_ids[missing] != SampledTokens.NOT_FINITE).any():
        raise InternalError(f"step {batch.step_id}: no token for some of rows {batch.rows[missing].tolist()}")


def commit_step(
    state: SchedulerState, batch: ScheduledBatch, step: InFlightStep, sampled: SampledTokens, now: float
) -> StepOutputs:
    ended = _fail_not_finite(state, step, sampled, now)
    live = state.columns.epochs.take(step.rows) == step.epochs
    for index, states in (sampled.pooled or {}).items():
        if live[index]:
            state.columns.request(int(step.rows[index])).pool(int(batch.start_positions[index]), states)
    _keep_prompt_logprobs(state.columns, batch, step.rows, live, sampled.prompt_logprobs or {})
    _commit_computed(state, batch, step.rows, live)
    sampling = live & batch.samples
    rows, tokens = step.rows[sampling], sampled.token_ids[sampling]
    requests = state.columns.append_tokens(rows, tokens, now)
    state.columns.write_back_some(batch.step_id)
    if state.virtual_counters is not None:
        _charge_outputs(state.virtual_counters, state.columns, rows)
    for index, reason in _find_endings(state.columns, rows, tokens):
        request = requests[index]
        request.stop_reason = int(tokens[index]) if reason is FinishReason.STOP else None
        state.end(request, reason, now)
        ended.append(request)
    return StepOutputs(requests, tokens, _select(sampled.logprobs, sampling), ended)


def _fail_not_finite(state: SchedulerState, step: InFlightStep, sampled: SampledTokens, now: float) -> list[Request]:
    failed = []
    for index in (sampled.token_ids == SampledTokens.NOT_FINITE).nonzero()[0].tolist():
        row = int(step.rows[index])
        if state.columns.epochs[row] != step.epochs[index]:
            continue
        request = state.columns.write_back(row)
        request.error = _no_token(request)
        state.end(request, FinishReason.ERROR, now, keep_cached=False)
        failed.append(request)
    return failed


def _no_token(request: Request) -> TidewheelError:
    if request.grammar is None and request.sampling.allowed_token_ids:
        return InvalidRequest(
            f"no token could follow {request.num_output_tokens} tokens of output: bad_words or min_tokens forbid all "
            "of allowed_token_ids, or the model's logits were not finite"
        )
    if request.grammar is None:
        return NumericError(
            f"the model's logits were not finite after {request.num_tokens} tokens; only this request is affected"
        )
    return InvalidRequest(
        f"no token could follow {request.num_output_tokens} tokens of output: its grammar has become too complex, or "
        "allows only tokens that allowed_token_ids or bad_words forbid, or the model's logits were not finite"
    )


def _keep_prompt_logprobs(
    columns: RowColumns,
    batch: ScheduledBatch,
    rows: RowArray,
    live: BoolArray,
    found: Mapping[int, list[TopLogprobs]],
) -> None:
    for index, entries in found.items():
        if live[index]:
            kept = columns.request(int(rows[index])).prompt_logprobs
            kept += entries[len(kept) - int(batch.start_positions[index]) :]


def _commit_computed(state: SchedulerState, batch: ScheduledBatch, rows: RowArray, live: BoolArray) -> None:
    """Count computed tokens; publish blocks known at entry, those of output at the end."""
    columns = state.columns
    rows, starts, counts = rows[live], batch.start_positions[live], batch.num_scheduled_tokens[live]
    ends = starts + counts
    columns.num_computed_tokens[rows] = ends
    columns.num_inflight_tokens[rows] -= counts
    for index in (starts < columns.num_entered_tokens.take(rows)).nonzero()[0].tolist():
        row = int(rows[index])
        state.kv.commit(row, columns.request(row), int(ends[index]))


def _charge_outputs(counters: VirtualCounters, columns: RowColumns, rows: RowArray) -> None:
    num_tokens = np.bincount(columns.tenant_ids.take(rows))
    for tenant_id in num_tokens.nonzero()[0].tolist():
        counters.charge(columns.tenants.names[tenant_id], 0, int(num_tokens[tenant_id]))


def _find_endings(columns: RowColumns, rows: RowArray, tokens: Int32Array) -> list[tuple[int, FinishReason]]:
    num_tokens = columns.num_tokens.take(rows)
    is_stop = np.logical_or.reduce(columns.stop_token_ids.take(rows, axis=1) == tokens)
    is_last = num_tokens >= columns.max_num_tokens.take(rows)
    endings = []
    for index in (is_stop | is_last).nonzero()[0].tolist():
        stops = is_stop[index] and num_tokens[index] >= columns.min_num_tokens[rows[index]]
        if stops or is_last[index]:
            endings.append((index, FinishReason.STOP if stops else FinishReason.LENGTH))
    return endings


def _select(logprobs: dict[int, TopLogprobs] | None, sampling: BoolArray) -> dict[int, TopLogprobs] | None:
    if not logprobs:
        return None
    sources = sampling.nonzero()[0].tolist()
    return {index: logprobs[source] for index, source in enumerate(sources) if source in logprobs}
