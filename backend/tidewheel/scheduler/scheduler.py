"""Continuous batching that mixes prefill and decode in each step.

A step computes tokens that a request has but whose keys and values are not yet cached, within a token budget.
`schedule` reserves blocks, `apply` takes the sampled tokens; between the two a batch is *in flight*. With two in
flight, no sequence exceeds `max_tokens`; if a stop ends a sequence, `apply` drops its token of the second batch.
"""

from collections.abc import Sequence

import numpy as np

from tidewheel.batch import BoolArray, Int32Array, RowArray, SampledTokens, ScheduledBatch, StepOutputs, accepted
from tidewheel.errors import DeadlineExceeded, InternalError, InvalidRequest, NumericError, TidewheelError, require
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.kvcache.sessions import SessionLimits
from tidewheel.request import FinishReason, Priority, Request
from tidewheel.sampling import TopLogprobs
from tidewheel.scheduler.admission import AdmissionControl
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.controllers import StepControl
from tidewheel.scheduler.goodput import Goodput
from tidewheel.scheduler.planner import StepPlanner
from tidewheel.scheduler.speculation import Proposer
from tidewheel.scheduler.state import SchedulerState
from tidewheel.scheduler.step_plan import InFlightStep, StepPlan
from tidewheel.stats import EngineStats


class Scheduler:
    """Owner of requests from `add` to their end. Not thread safe; `now` is in monotonic seconds."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self._state = SchedulerState(kv, config)
        self._control = StepControl(self._state)
        self.admission = AdmissionControl(self._state, self._control.estimate)
        self._now = 0.0
        self.max_inflight_steps = config.max_inflight_steps
        self.step_time = self._state.step_time
        self.loras = self._state.loras

    def reconfigure(self, config: SchedulerConfig, session_limits: SessionLimits) -> None:
        """Change settings, also with batches in flight. No request ends. The number of rows cannot grow."""
        require(config.num_rows <= self._state.columns.num_rows, f"{config.num_rows} rows are more than there are")
        before = self._state.config
        self._state.reconfigure(config)
        self._control.reconfigure()
        self.admission.reconfigure(before)
        self._state.kv.sessions.reconfigure(session_limits)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._state.requests)

    @property
    def max_drafts(self) -> int:
        """Return the most drafts of a row in a step; 0 without speculation."""
        return self._state.config.num_speculative_tokens if self._state.speculation is not None else 0

    @property
    def num_running(self) -> int:
        return self._state.columns.num_running

    @property
    def num_waiting(self) -> int:
        return self._state.num_waiting

    def add_group(self, requests: Sequence[Request], now: float) -> list[Request]:
        """Queue the `n` sequences of a prompt, all or none. The first leads, the others follow.

        Return displaced requests. Raise `InvalidRequest`, `Busy` or `DeadlineExceeded`.
        """
        self._now = now
        if requests[0].session_id:
            self._state.kv.sessions.arrive(requests[0].tenant, requests[0].session_id, now)
        return self.admission.admit(requests, now)

    def cancel(
        self, request_id: str, reason: FinishReason = FinishReason.CANCELLED, error: TidewheelError | None = None
    ) -> Request | None:
        """End a request in any state and return it; None if unknown or finished."""
        request = self._state.requests.get(request_id)
        if request is not None:
            request.error = error
            self._state.end(request, reason, self._now)
        return request

    def expire(self, now: float) -> list[Request]:
        """End expired sessions. Return requests past their deadline and those whose adapter cannot be read.

        Requests that never started get an error, and all of an adapter its error. Lower the class of requests that
        would miss their objective, or end them, as each asks.
        """
        self._now = now
        self._state.kv.sessions.expire(now)
        state, expired = self._state, []
        for _, _, request in state.deadlines.pop_due(now):
            reason = FinishReason.DEADLINE
            if request.first_scheduled_time is None:
                reason = FinishReason.ERROR
                request.error = DeadlineExceeded(
                    f"the deadline passed after {round(1e3 * (now - request.arrival_time))} ms in the waiting set: "
                    f"{state.num_waiting} requests wait, {self.num_running} run"
                )
            state.end(request, reason, now)
            state.stats.num_expired += 1
            expired.append(request)
        for request in state.loras.failed_requests():
            assert request.lora is not None
            request.error = request.lora.error
            state.end(request, FinishReason.ERROR, now)
            expired.append(request)
        return expired + self.admission.refuse_late(now)

    def close_session(self, tenant: str, session_id: str) -> None:
        self._state.kv.sessions.close(tenant, session_id)

    def pause_session(self, tenant: str, session_id: str, tools: Sequence[str], now: float) -> None:
        """Note that a session's turn has ended with calls of tools; ignore an unknown session."""
        self._state.kv.sessions.pause(tenant, session_id, tools, now)

    def fail_all(self, error: TidewheelError) -> list[Request]:
        """End all requests; forget batches in flight."""
        state = self._state
        state.in_flight.clear()
        state.kv.transfers.abandon()
        failed = list(state.requests.values())
        for request in failed:
            request.error = error
            state.end(request, FinishReason.ERROR, self._now, keep_cached=False)
        state.loras.discard_loads(state.loras.contents)
        return failed

    def best_class(self) -> int:
        """Return the best class of unfinished requests, NORMAL by a policy without classes; 0 if there are none."""
        state = self._state
        if not (state.requests and state.policy.by_class):
            return int(Priority.NORMAL) if state.requests else 0
        waiting = [priority for priority, count in enumerate(state.stats.waiting_by_class, 1) if count]
        running: list[int] = state.columns.classes[state.columns.running].tolist()
        return min(waiting + running)

    def schedule(self, now: float, slice_s: float | None = None) -> ScheduledBatch | None:
        """Return the next batch; None if nothing can run or `max_inflight_steps` are in flight.

        Cut it to `slice_s` seconds, but not below what each row needs.
        """
        state = self._state
        if len(state.in_flight) >= self.max_inflight_steps or state.awaits_tokens():
            return None
        self._now = state.kv.sessions.now = state.loras.now = now
        state.reclassify_due(now)
        state.release_followers(now)
        self._control.expect_weights(now)
        plan = StepPlanner(state, self._control.limits(now, slice_s), now).plan()
        if plan.started:
            self._control.strategy.joined(plan.num_joined)
            self.admission.observe_starts(plan.started, now)
        return None if plan.is_empty else self._reserve(plan, now)

    def _reserve(self, plan: StepPlan, now: float) -> ScheduledBatch:
        state = self._state
        step_id = state.stats.num_steps
        num_needed = 0 if state.blocked is None else state.blocked.num_needed
        transfers = state.kv.take_transfers(step_id, keep_free=max(state.columns.num_running, num_needed))
        batch = plan.to_batch(step_id, state.columns.take_left_rows(), transfers)
        rows = batch.rows.astype(np.intp)
        batch = state.loras.with_slots(self._control.choose_weights(batch, rows), rows)
        state.columns.reserve(step_id, rows, batch.num_scheduled_tokens, batch.samples)
        epochs, has_drafts = state.columns.epochs.take(rows), len(batch.draft_tokens) > 0
        step = InFlightStep(step_id, rows, epochs, now, plan.started, plan.turn, has_drafts, state.has_waited)
        state.in_flight.append(step)
        state.stats.num_steps += 1
        state.stats.num_scheduled_tokens += batch.num_tokens
        state.stats.step_tokens.observe(batch.num_tokens)
        return batch

    def apply(self, batch: ScheduledBatch, sampled: SampledTokens, now: float) -> StepOutputs:
        """Apply the oldest batch in flight. Raise `InternalError`, without effect, for any other."""
        state = self._state
        if not state.in_flight or state.in_flight[0].step_id != batch.step_id:
            raise InternalError(f"step {batch.step_id} is not the oldest one in flight")
        _check_answer(batch, sampled)
        self._now = now
        step = state.in_flight.popleft()
        state.kv.transfers.done(batch.step_id)
        outputs = _commit_step(state, batch, step, sampled, now)
        self._control.observe_step(step, batch, outputs, now)
        return outputs

    def use_proposer(self, proposer: Proposer, goodput: Goodput | None = None) -> None:
        """Take drafts from another proposer, and their numbers from `goodput`, while no request is unfinished."""
        self._state.use_proposer(proposer, goodput)

    def stats(self) -> EngineStats:
        state, control = self._state, self._control
        stats = state.kv.update_stats()
        state.columns.update_stats(stats)
        stats.num_waiting = state.num_waiting
        stats.breaker_state = self.admission.breaker.state
        stats.token_budget = control.token_budget
        stats.max_num_seqs = control.max_num_seqs
        stats.num_predictions = state.predictor.num_observed
        stats.prediction_error = state.predictor.mean_abs_error
        stats.num_lora_slots = len(state.loras.contents)
        self.admission.count_loras()
        return stats.snapshot()

    def oldest_waits(self, now: float) -> list[float]:
        """Return by class the seconds that its oldest request has waited unstarted; 0 if none."""
        oldest = self._state.waiting.oldest_by_class()
        return [0.0 if request is None else max(now - request.arrival_time, 0.0) for request in oldest]

    def unfinished(self) -> list[Request]:
        """Return requests by arrival, with all output so far."""
        columns = self._state.columns
        for row in columns.running.nonzero()[0].tolist():
            columns.write_back(row)
        return list(self._state.requests.values())

    def check_invariants(self) -> None:
        """Check, if no request is unfinished, that none has left anything. Raise `InternalError`."""
        state = self._state
        if not state.in_flight and not state.requests:
            require(not state.waiting and not state.loras.waiting, "ended requests wait")
            require(not state.columns.running.any() and not state.loras.running, "ended requests run")
            require(state.stats.num_waiting_tokens == 0, "waiting tokens are miscounted")
            require(state.kv.transfers.num_returning_blocks() == 0, "blocks are held without a batch")
            require(state.kv.num_free_blocks == state.kv.num_blocks, "blocks are lost")


def _check_answer(batch: ScheduledBatch, sampled: SampledTokens) -> None:
    if sampled.step_id != batch.step_id or len(sampled.token_ids) != len(batch.rows):
        raise InternalError(
            f"step {batch.step_id} with {len(batch.rows)} rows was answered with "
            f"{len(sampled.token_ids)} tokens of step {sampled.step_id}"
        )
    missing = batch.samples & (sampled.token_ids < 0)
    if np.count_nonzero(missing) and (sampled.token_ids[missing] != SampledTokens.NOT_FINITE).any():
        raise InternalError(f"step {batch.step_id}: no token for some of rows {batch.rows[missing].tolist()}")


def _commit_step(
    state: SchedulerState, batch: ScheduledBatch, step: InFlightStep, sampled: SampledTokens, now: float
) -> StepOutputs:
    columns, speculation = state.columns, state.speculation
    drafts = batch.draft_tokens if sampled.draft_tokens is None else sampled.draft_tokens
    num_tokens = batch.start_positions + batch.num_scheduled_tokens + 1
    stops = _are_stops(columns, step.rows, sampled.token_ids, num_tokens)
    follows = np.ones(len(step.rows), np.bool_)  # whether the drafts so far are right, and no stop tokens
    if step.has_drafts:
        follows = accepted(drafts, np.where(stops, SampledTokens.NOT_SAMPLED, sampled.token_ids))
    live = follows & (columns.epochs.take(step.rows) == step.epochs)
    fails = live & (sampled.token_ids == SampledTokens.NOT_FINITE)
    live &= ~fails
    _keep_of_prompts(columns, batch, step, sampled, live)
    rows, starts, counts = step.rows[live], batch.start_positions[live], batch.num_scheduled_tokens[live]
    columns.num_computed_tokens[rows] = starts + counts
    columns.num_inflight_tokens[rows] -= counts
    for index in (starts < columns.num_entered_tokens.take(rows)).nonzero()[0].tolist():
        row = int(rows[index])
        # blocks of output are published at the end
        num_computed_tokens = min(columns.num_cacheable_tokens(row), int(columns.num_entered_tokens[row]))
        state.kv.commit(row, columns.request(row), num_computed_tokens)
    sampling = live & batch.samples
    rows, tokens = step.rows[sampling], sampled.token_ids[sampling]
    num_tokens, stops = num_tokens[sampling], stops[sampling]
    requests = columns.append_tokens(rows, tokens, num_tokens, now)
    if step.has_drafts:
        state.settle_drafts(rows)
    columns.write_back_some(batch.step_id)
    if speculation is not None:
        if step.has_drafts:
            speculation.observe_drafts(step.rows, drafts, follows, has_caught_up=sampled.has_caught_up)
        speculation.observe(rows, tokens)
    _charge_tenants(state, rows)
    ended = _fail_not_finite(state, step.rows[fails], now)
    for index in (stops | (num_tokens >= columns.max_num_tokens.take(rows))).nonzero()[0].tolist():
        request = requests[index]
        request.stop_reason = int(tokens[index]) if stops[index] else None
        state.end(request, FinishReason.STOP if stops[index] else FinishReason.LENGTH, now)
        ended.append(request)
    if speculation is not None:
        speculation.propose()
    return StepOutputs(requests, tokens, _select(sampled.logprobs, sampling), ended)


def _keep_of_prompts(
    columns: RowColumns, batch: ScheduledBatch, step: InFlightStep, sampled: SampledTokens, live: BoolArray
) -> None:
    for index, states in (sampled.pooled or {}).items():
        if live[index]:
            columns.request(int(step.rows[index])).pool(int(batch.start_positions[index]), states)
    for index, entries in (sampled.prompt_logprobs or {}).items():
        if live[index]:
            kept = columns.request(int(step.rows[index])).prompt_logprobs
            kept += entries[len(kept) - int(batch.start_positions[index]) :]


def _charge_tenants(state: SchedulerState, rows: RowArray) -> None:
    if state.virtual_counters is not None:
        num_tokens = np.bincount(state.columns.tenant_ids.take(rows))
        for tenant_id in num_tokens.nonzero()[0].tolist():
            state.virtual_counters.charge(state.columns.tenant_names[tenant_id], 0, int(num_tokens[tenant_id]))


def _fail_not_finite(state: SchedulerState, rows: RowArray, now: float) -> list[Request]:
    failed = []
    for row in rows.tolist():
        request = state.columns.write_back(row)
        request.error = request.error or _no_token(request)
        state.end(request, FinishReason.ERROR, now, keep_cached=False)
        failed.append(request)
    return failed


def _no_token(request: Request) -> TidewheelError:
    if request.grammar is not None:
        cause = "its grammar has become too complex, or allows only tokens that allowed_token_ids or bad_words forbid"
    elif request.sampling.allowed_token_ids:
        cause = "bad_words or min_tokens forbid all of allowed_token_ids"
    else:
        return NumericError(
            f"the model's logits were not finite after {request.num_tokens} tokens; only this request is affected"
        )
    return InvalidRequest(
        f"no token could follow {request.num_output_tokens} tokens of output: {cause}, or the model's logits were "
        "not finite"
    )


def _are_stops(columns: RowColumns, rows: RowArray, tokens: Int32Array, num_tokens: Int32Array) -> BoolArray:
    """Return which tokens [n] end their rows; with it, a row has `num_tokens` [n]."""
    is_stop: BoolArray = np.logical_or.reduce(columns.stop_token_ids.take(rows, axis=1) == tokens)
    return is_stop & (num_tokens >= columns.min_num_tokens.take(rows))


def _select(logprobs: dict[int, TopLogprobs] | None, sampling: BoolArray) -> dict[int, TopLogprobs] | None:
    if not logprobs:
        return None
    sources = sampling.nonzero()[0].tolist()
    return {index: logprobs[source] for index, source in enumerate(sources) if source in logprobs}
