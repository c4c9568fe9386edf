"""What the scheduler learns from its steps, and the knobs that are moved by it. Each knob has one writer."""

from __future__ import annotations

import math

from tidewheel.batch import ScheduledBatch
from tidewheel.scheduler.budget import SeqsGovernor, TpotController
from tidewheel.scheduler.commit import InFlight
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.plan import StepLimits
from tidewheel.scheduler.preemption_cost import PreemptionCost
from tidewheel.scheduler.queue import WaitingSet
from tidewheel.scheduler.queue_time import ServiceEstimate
from tidewheel.scheduler.state import State
from tidewheel.scheduler.step_time import StepTime
from tidewheel.scheduler.strategy import JoinView, make_strategy

MIN_TOKEN_BUDGET = 16  # that the TPOT controller goes down to
_BUSY_SECONDS = 1.0  # time constant of the busy fraction


class Control:
    """The limits of each step: token budget, running requests, joins."""

    def __init__(self, config: SchedulerConfig, keep_free: int) -> None:
        self._config = config
        self._keep_free = keep_free
        step_time = StepTime()
        self._step_time = step_time
        self.estimate = ServiceEstimate(step_time, config.max_num_batched_tokens)
        self.preemption_cost = PreemptionCost(step_time, config.swap_seconds_per_block)
        self.strategy = make_strategy(config.strategy)
        self._tpot = (
            None
            if config.target_tpot_s is None
            else TpotController(config.target_tpot_s, config.max_num_batched_tokens, MIN_TOKEN_BUDGET)
        )
        self._governor = (
            SeqsGovernor(config.max_num_seqs, config.governor_target_latency_s)
            if config.enable_seqs_governor
            else None
        )
        self.token_budget = config.max_num_batched_tokens
        self.max_num_seqs = config.max_num_seqs
        self._last_applied: float | None = None
        self._busy = 0.0  # step time over wall time, smoothed

    def limits(self, waiting: WaitingSet, num_running: int, now: float) -> StepLimits:
        """Of the step that is scheduled now."""
        budget = max(self.token_budget, num_running + 1)  # every row decodes, and a prompt always progresses
        return StepLimits(
            min(budget, self._config.max_num_batched_tokens),
            self._config.max_chunk_tokens,
            self.max_num_seqs,
            self._max_joins(waiting, num_running, now) if waiting else 0,
            self._keep_free,
        )

    def observe_step(self, step: InFlight, batch: ScheduledBatch, state: State, now: float) -> None:
        """A batch was applied. Of two in flight, the device had the second one from the end of the first."""
        start = step.scheduled_at if self._last_applied is None else max(step.scheduled_at, self._last_applied)
        seconds = max(now - start, 0.0)
        self._step_time.observe(batch.num_tokens - batch.num_decodes, seconds, now)
        self.estimate.observe_step(now, step.num_started_tokens, state.waiting.num_new)
        if step.oldest_start is not None:
            self.strategy.observe_batch(max(now - step.oldest_start, 0.0))
        if self._tpot is not None:
            self.token_budget = self._tpot.observe(seconds, batch.num_decodes, batch.num_tokens)
        if self._governor is not None:
            self._govern(self._governor, state, seconds, now)
        self._last_applied = now

    def _govern(self, governor: SeqsGovernor, state: State, seconds: float, now: float) -> None:
        elapsed = seconds if self._last_applied is None else now - self._last_applied
        if elapsed > 0.0:
            weight = 1.0 - math.exp(-elapsed / _BUSY_SECONDS)
            self._busy += weight * (min(seconds / elapsed, 1.0) - self._busy)
        kv_usage = 1.0 - state.kv.num_free_blocks / state.kv.num_blocks
        self.max_num_seqs = governor.observe(kv_usage, seconds, self._busy, state.columns.num_running, now)

    def _max_joins(self, waiting: WaitingSet, num_running: int, now: float) -> int:
        oldest = waiting.oldest_arrival
        limit = max(self.max_num_seqs, num_running)  # the governor lowers it and ends nobody
        view = JoinView(num_running, waiting.num_new, now if oldest is None else oldest, limit)
        return self.strategy.max_joins(now, view)
