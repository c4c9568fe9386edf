"""Continuous batching: who computes how many tokens in the next step, and what the sampled tokens change.

There are no prefill and decode phases. A running request has tokens, and computed tokens that catch up with them;
each step spends a token budget on closing the gaps. Chunked prefill, prefix hits, the return of a preempted request
and mixed batches are all that one rule.

`schedule` reserves and `apply` commits. Between the two a batch is *in flight*; with `max_inflight_steps` 2 the next
one may be scheduled meanwhile, without knowing the tokens that the device is about to sample: ends by length are
known ahead, other ends are found when the batch is applied, and the row's extra token is dropped.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tidewheel.batch import SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.errors import InternalError, InvalidRequest, TidewheelError
from tidewheel.kvcache.invariants import require
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import FinishReason, Request
from tidewheel.scheduler.admission import Admission
from tidewheel.scheduler.commit import InFlight, check_answer, commit_step
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.policy import POLICIES, rank
from tidewheel.scheduler.reserve import plan_step
from tidewheel.scheduler.state import State
from tidewheel.scheduler.stats import SchedulerStats


class Scheduler:
    """Owns every request from `add` to its one end. Not thread safe; reads no clock: `now` is monotonic seconds."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self._config = config
        self._policy = POLICIES[config.policy]
        self._admission = Admission(config, kv.num_blocks, kv.block_size)
        self._state = State(kv, config.num_rows)
        self._in_flight: deque[InFlight] = deque()
        self._num_added = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._state.requests)

    @property
    def num_running(self) -> int:
        return self._state.columns.num_running

    @property
    def num_waiting(self) -> int:
        """Never started, and preempted."""
        return len(self._state.waiting)

    def add(self, request: Request, now: float) -> None:
        """Accepts the request, or changes nothing and raises `InvalidRequest` (it can never run) or `Busy`."""
        state = self._state
        if request.request_id in state.requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use by a request that has not ended")
        self._admission.check(request, state.waiting, now)
        state.wait(request, rank(self._policy, request, self._num_added))
        self._num_added += 1

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> Request | None:
        """Ends the request in whatever state it is, also in flight; None if it is unknown or has ended.

        No token of it is delivered afterwards.
        """
        request = self._state.requests.get(request_id)
        if request is not None:
            self._state.end(request, reason)
        return request

    def fail_all(self, error: TidewheelError) -> list[Request]:
        """Ends every unfinished request with the error. Batches in flight are forgotten: they can't be applied."""
        state = self._state
        self._in_flight.clear()
        state.last_applied = state.counters.num_steps - 1
        state.kv.all_steps_done()
        failed = list(state.requests.values())
        for request in failed:
            request.error = error
            state.end(request, FinishReason.ERROR)
        return failed

    def schedule(self, now: float) -> ScheduledBatch | None:
        """The next step; None if nothing can run, or `max_inflight_steps` batches are in flight."""
        if len(self._in_flight) >= self._config.max_inflight_steps:
            return None
        state = self._state
        plan = plan_step(state, self._admission, self._config.max_num_batched_tokens, now)
        if plan.is_empty:
            return None
        step_id = state.counters.num_steps
        batch = plan.to_batch(step_id, state.columns.take_left_rows())
        rows = batch.rows.astype(np.intp)
        state.columns.reserve(step_id, rows, batch.num_scheduled_tokens, batch.samples)
        self._in_flight.append(InFlight(step_id, rows, state.columns.epochs.take(rows)))
        state.counters.num_steps += 1
        state.counters.num_scheduled_tokens += batch.num_tokens
        return batch

    def apply(self, batch: ScheduledBatch, sampled: SampledTokens, now: float) -> StepOutputs:
        """What the oldest batch in flight brought.

        Raises `InternalError`, and changes nothing, for any other batch and for an answer that does not fit it.
        """
        if not self._in_flight or self._in_flight[0].step_id != batch.step_id:
            raise InternalError(f"step {batch.step_id} is not the oldest one in flight")
        check_answer(batch, sampled)
        step = self._in_flight.popleft()
        self._state.last_applied = batch.step_id
        self._state.kv.step_done(batch.step_id)
        return commit_step(self._state, batch, step, sampled, now)

    def stats(self) -> SchedulerStats:
        state, kv, counters = self._state, self._state.kv, self._state.counters
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_waiting_tokens=state.waiting.num_tokens,
            waiting_by_class=state.waiting.by_class,
            num_blocks=kv.num_blocks,
            num_free_blocks=kv.num_free_blocks,
            num_cached_blocks=kv.num_cached_blocks,
            num_steps=counters.num_steps,
            num_scheduled_tokens=counters.num_scheduled_tokens,
            num_prefix_queries=counters.num_prefix_queries,
            num_prefix_hits=counters.num_prefix_hits,
            num_preemptions=counters.num_preemptions,
        )

    def check_invariants(self) -> None:
        """Raises `InternalError` naming what is broken. O(blocks + requests): for tests and idle moments."""
        state = self._state
        state.check_invariants()
        require(len(self._in_flight) <= self._config.max_inflight_steps, "too many batches in flight")
        if not self._in_flight:
            columns, rows = state.columns, state.columns.running
            in_flight = columns.num_inflight_tokens[rows].sum() + columns.num_inflight_samples[rows].sum()
            require(int(in_flight) == 0, "tokens are in flight without a batch")
            require(state.kv.num_held_blocks == 0, "blocks are held without a batch")
        if not self._in_flight and not state.requests:
            require(state.kv.num_free_blocks == state.kv.num_blocks, "blocks are lost")
