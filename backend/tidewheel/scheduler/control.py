"""Step limits, learned from earlier steps."""

from __future__ import annotations

import math

from tidewheel.batch import ScheduledBatch
from tidewheel.scheduler.budget import AppliedStep, Knobs, make_controllers
from tidewheel.scheduler.commit import InFlight
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.plan import StepLimits
from tidewheel.scheduler.queue import WaitingSet
from tidewheel.scheduler.state import State
from tidewheel.scheduler.step_time import PreemptionCost, ServiceEstimate, StepTime
from tidewheel.scheduler.strategy import JoinView, make_strategy

_BUSY_SECONDS = 1.0  # time constant of the busy fraction


class Control:
    def __init__(self, config: SchedulerConfig, keep_free: int) -> None:
        self._config = config
        self._keep_free = keep_free
        self._step_time = StepTime()
        self.estimate = ServiceEstimate(self._step_time, config.max_num_batched_tokens)
        self.preemption_cost = PreemptionCost(self._step_time, config.swap_seconds_per_block)
        self.strategy = make_strategy(config.strategy)
        self.knobs = Knobs(config.max_num_batched_tokens, config.max_num_seqs)
        self._controllers = make_controllers(config)
        self._last_applied: float | None = None
        self._busy = 0.0

    def limits(self, waiting: WaitingSet, num_running: int, now: float) -> StepLimits:
        budget = max(self.knobs.token_budget, num_running + 1)  # each row decodes, one prompt progresses
        return StepLimits(
            min(budget, self._config.max_num_batched_tokens),
            self._config.max_chunk_tokens,
            self.knobs.max_num_seqs,
            self._max_joins(waiting, num_running, now) if waiting else 0,
            self._keep_free,
        )

    def observe_step(self, step: InFlight, batch: ScheduledBatch, state: State, now: float) -> None:
        """Learn from an applied batch. A second one in flight starts when the first ends."""
        last = step.scheduled_at if self._last_applied is None else self._last_applied
        seconds = max(now - max(step.scheduled_at, last), 0.0)
        self._step_time.observe(batch.num_tokens - batch.num_decodes, seconds, now)
        self.estimate.observe_step(now, step.num_started_tokens, state.waiting.num_new)
        if step.oldest_start is not None:
            self.strategy.observe_batch(max(now - step.oldest_start, 0.0))
        if self._controllers:
            self._adjust(batch, state, seconds, now - last, now)
        self._last_applied = now

    def _adjust(self, batch: ScheduledBatch, state: State, seconds: float, elapsed: float, now: float) -> None:
        if elapsed > 0.0:
            weight = 1.0 - math.exp(-elapsed / _BUSY_SECONDS)
            self._busy += weight * (min(seconds / elapsed, 1.0) - self._busy)
        kv_usage = 1.0 - state.kv.num_free_blocks / state.kv.num_blocks
        num_running = state.columns.num_running
        step = AppliedStep(now, seconds, batch.num_decodes, batch.num_tokens, num_running, kv_usage, self._busy)
        for controller in self._controllers:
            controller.observe(step)
            self.knobs = controller.set(self.knobs)

    def _max_joins(self, waiting: WaitingSet, num_running: int, now: float) -> int:
        oldest = waiting.oldest_arrival
        limit = max(self.knobs.max_num_seqs, num_running)  # lowering the limit ends no request
        view = JoinView(num_running, waiting.num_new, now if oldest is None else oldest, limit)
        return self.strategy.max_joins(now, view)
