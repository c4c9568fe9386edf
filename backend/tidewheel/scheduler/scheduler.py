"""Continuous batching without prefill and decode phases.

Each step spends a token budget on the gaps between tokens and computed tokens. `schedule` reserves, `apply` commits;
in between a batch is *in flight*. With two in flight, ends by length are known ahead; at other ends `apply` drops the
extra token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tidewheel.batch import SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.errors import DeadlineExceeded, InternalError, TidewheelError, require
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.kvcache.sessions import SessionLimits
from tidewheel.request import FinishReason, Priority, Progress, Request
from tidewheel.scheduler.admission import AdmissionControl
from tidewheel.scheduler.commit import InFlightStep, check_answer, commit_step
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.controllers import StepControl
from tidewheel.scheduler.planner import plan_step
from tidewheel.scheduler.service_class import reclassify_due
from tidewheel.scheduler.state import SchedulerState
from tidewheel.scheduler.step_plan import StepPlan
from tidewheel.stats import EngineStats, WaitingRoom


class Scheduler:
    """Owner of requests from `add` to their end. Not thread safe; `now` is in monotonic seconds."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self._config = config
        self._control = StepControl(config, keep_free=int(config.watermark * kv.num_blocks))
        self._state = SchedulerState(kv, config, self._control.preemption_cost)
        self._admission = AdmissionControl(config, self._state, self._control.estimate)
        self._in_flight: deque[InFlightStep] = deque()
        self._now = 0.0

    def reconfigure(self, config: SchedulerConfig, session_limits: SessionLimits) -> None:
        """Change settings, also with batches in flight. No request ends; rows can only become fewer."""
        require(config.num_rows <= self._state.columns.num_rows, f"{config.num_rows} rows are more than there are")
        self._config = config
        self._control.reconfigure(config)
        self._state.reconfigure(config)
        self._admission.reconfigure(config)
        self._state.kv.sessions.reconfigure(session_limits)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._state.requests)

    @property
    def max_inflight_steps(self) -> int:
        return self._config.max_inflight_steps

    @property
    def num_running(self) -> int:
        return self._state.columns.num_running

    @property
    def num_waiting(self) -> int:
        return self._state.num_waiting

    def add(self, request: Request, now: float) -> list[Request]:
        """Return the evicted requests. Raise `InvalidRequest`, `Busy` or `DeadlineExceeded`."""
        return self.add_group([request], now)

    def add_group(self, requests: Sequence[Request], now: float) -> list[Request]:
        """Add all requests or none. They differ in id and seed; all but the first have it as `leader`."""
        self._now = now
        evicted = self._admission.admit(requests, now)
        self._admission.observe_ends(evicted, now)
        return evicted

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> Request | None:
        """End a request in any state; return None if unknown or finished."""
        request = self._state.requests.get(request_id)
        if request is not None:
            self._state.end(request, reason, self._now)
            self._admission.observe_ends([request], self._now)
        return request

    def expire(self, now: float) -> list[Request]:
        """End sessions, and requests past their deadline; only those that never started get an error."""
        self._now = now
        self._state.kv.sessions.expire(now)
        state, expired = self._state, []
        for _, _, request in state.timers.deadlines.pop_due(now):
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
        self._admission.observe_ends(expired, now)
        return expired

    def close_session(self, tenant: str, session_id: str) -> None:
        self._state.kv.sessions.close(tenant, session_id)

    def fail_all(self, error: TidewheelError) -> list[Request]:
        """End all requests with the error; forget batches in flight."""
        state = self._state
        self._in_flight.clear()
        state.last_applied = state.stats.num_steps - 1
        state.kv.transfers.abandon()
        failed = list(state.requests.values())
        for request in failed:
            request.error = error
            state.end(request, FinishReason.ERROR, self._now, keep_cached=False)
        self._admission.observe_ends(failed, self._now)
        return failed

    def schedule(self, now: float) -> ScheduledBatch | None:
        """Return the next batch; None if nothing can run or `max_inflight_steps` are in flight."""
        if len(self._in_flight) >= self._config.max_inflight_steps:
            return None
        self._now = now
        state = self._state
        reclassify_due(state, now)
        state.release_followers(now)
        plan = plan_step(state, self._control.limits(state.waiting, self.num_running, now), now)
        if plan.started:
            self._control.strategy.joined(plan.num_joined)
            self._admission.observe_starts(plan.started, now)
        return None if plan.is_empty else self._reserve(plan, now)

    def _reserve(self, plan: StepPlan, now: float) -> ScheduledBatch:
        state = self._state
        step_id = state.stats.num_steps
        batch = plan.to_batch(step_id, state.columns.take_left_rows(), state.kv.take_transfers(step_id))
        rows = batch.rows.astype(np.intp)
        state.columns.reserve(step_id, rows, batch.num_scheduled_tokens, batch.samples)
        self._in_flight.append(InFlightStep(step_id, rows, state.columns.epochs.take(rows), now, plan.started))
        state.stats.num_steps += 1
        state.stats.num_scheduled_tokens += batch.num_tokens
        state.stats.step_tokens.observe(batch.num_tokens)
        return batch

    def predict_seconds(self, batch: ScheduledBatch) -> float | None:
        """Return the longest expected seconds; None before the first step."""
        return self._control.predict_seconds(batch)

    def apply(self, batch: ScheduledBatch, sampled: SampledTokens, now: float) -> StepOutputs:
        """Apply the oldest batch in flight. Raise `InternalError`, without effect, for any other."""
        if not self._in_flight or self._in_flight[0].step_id != batch.step_id:
            raise InternalError(f"step {batch.step_id} is not the oldest one in flight")
        check_answer(batch, sampled)
        self._now = now
        state = self._state
        step = self._in_flight.popleft()
        state.last_applied = batch.step_id
        state.kv.transfers.done(batch.step_id)
        outputs = commit_step(state, batch, step, sampled, now)
        if outputs.finished:
            self._admission.observe_ends(outputs.finished, now)
        self._control.observe_step(step, batch, state, now)
        return outputs

    def observe_refused(self, refused: Mapping[str, int]) -> None:
        self._admission.observe_refused(refused)

    def stats(self) -> EngineStats:
        state, control = self._state, self._control
        stats = state.kv.update_stats()
        state.columns.update_stats(stats)
        stats.num_waiting = state.num_waiting
        stats.breaker_state = self._admission.breaker.state.value
        stats.token_budget = control.token_budget
        stats.max_num_seqs = control.max_num_seqs
        stats.num_predictions = state.predictor.num_observed
        stats.prediction_error = state.predictor.mean_abs_error
        return stats.snapshot()

    def oldest_waits(self, now: float) -> list[float]:
        """Return the seconds that the oldest new request of each current class has waited."""
        oldest = (self._state.waiting.oldest(service_class) for service_class in Priority)
        return [0.0 if request is None else max(now - request.arrival_time, 0.0) for request in oldest]

    def unfinished(self) -> Iterator[Progress]:
        columns = self._state.columns
        for request in self._state.requests.values():
            if request.row < 0:
                yield Progress(request, request.num_tokens, request.num_preemptions)
            else:
                num_tokens, num_preemptions = columns.num_tokens[request.row], columns.num_preemptions[request.row]
                yield Progress(request, int(num_tokens), int(num_preemptions))

    def waiting_room(self, now: float) -> WaitingRoom:
        return self._admission.waiting_room(now)

    def check_invariants(self) -> None:
        """Raise `InternalError`. O(blocks + requests)."""
        state = self._state
        state.check_invariants()
        require(len(self._in_flight) <= self._config.max_inflight_steps, "too many batches in flight")
        if not self._in_flight:
            columns, rows = state.columns, state.columns.running
            in_flight = columns.num_inflight_tokens[rows].sum() + columns.num_inflight_samples[rows].sum()
            require(int(in_flight) == 0, "tokens are in flight without a batch")
            require(state.kv.transfers.num_returning_blocks() == 0, "blocks are held without a batch")
        if not self._in_flight and not state.requests:
            require(state.kv.num_free_blocks == state.kv.num_blocks, "blocks are lost")
