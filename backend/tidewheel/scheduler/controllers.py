import math
from collections import Counter
from dataclasses import replace

import numpy as np

from tidewheel.batch import SPARE_LOGITS, RowArray, ScheduledBatch, StepOutputs
from tidewheel.request import Priority
from tidewheel.scheduler.estimates import ServiceEstimate, StepTime
from tidewheel.scheduler.state import SchedulerState
from tidewheel.scheduler.step_plan import InFlightStep, StepLimits
from tidewheel.scheduler.strategy import STRATEGIES, JoinView

MIN_TOKEN_BUDGET = 16
KV_HIGH = 0.90
KV_GOAL = 0.85
KV_LOW = 0.80
BUSY_LOW = 0.85
GOVERNOR_PERIOD_S = 0.5
MEMORY_RELIEVED = 8 / 9  # of a limit: pressure is over below
LATENCY_RELIEVED = 0.5
HOLD_S = 2.0  # without pressure until full weights compute again

_GAIN = 0.2
_AIM = 0.97
_DEAD_BAND = 0.03
_MAX_CHANGE = 0.25  # of the logarithm, per step
_LIMITED = 0.9  # of the budget; emptier steps never raise it
_LATENCY_LOW = 0.9
_MEMORY_S = 30.0  # time constant of peak use
_NO_USE = 1e-6
_MOST_LOWERED = 0.75  # of the running requests
_SMOOTHING = 0.2
_BUSY_SECONDS = 1.0
_LEAST_CHUNK = 4  # prompt tokens of a step that is paced by a time per output token
_LEAST_PACE = 0.5  # of that time, for a request that is late
_PACE_CAUTION = 0.5  # standard deviations of a paced step, whose errors even out over its tokens


class TpotController:
    """Controller that keeps the time of decoding steps at `target_s` by changing the token budget.

    Clamped integral control: ln B ← ln B + gain · ln(0.97 · target / step time). As d ln t / d ln B is between 0 and
    1, the loop gain is at most 0.2: no overshoot, even two steps late (z² - z + g has real roots for g ≤ 1/4).
    """

    def __init__(self, target_s: float, max_budget: int, min_budget: int) -> None:
        self.target_s = target_s
        self._max_budget = max_budget
        self._min_budget = min(min_budget, max_budget)
        self._exact_budget = float(max_budget)

    @property
    def budget(self) -> int:
        return round(self._exact_budget)

    def observe(self, seconds: float, num_decodes: int, num_tokens: int) -> None:
        if num_decodes < 1 or seconds <= 0.0:
            return  # no TPOT
        error = math.log(_AIM * self.target_s / seconds)
        if abs(error) < _DEAD_BAND or (error > 0.0 and num_tokens < _LIMITED * self.budget):
            return
        moved = self._exact_budget * math.exp(min(max(_GAIN * error, -_MAX_CHANGE), _MAX_CHANGE))
        self._exact_budget = min(max(moved, self._min_budget), self._max_budget)


class SeqsGovernor:
    """Controller of the limit on running requests, twice a second.

    The limit falls, by at most a quarter, to the number of requests that use 85 % of the KV blocks and keep a step
    within the target latency. It rises by 1/32 of `max_num_seqs` while 85 % suffice at the peak of blocks per request
    in 30 s.
    """

    def __init__(self, max_num_seqs: int, target_latency_s: float | None = None) -> None:
        self.max_num_seqs = max_num_seqs
        self.target_s = target_latency_s
        self._most = max_num_seqs
        self._latency: float | None = None
        self._usage_each = 0.0
        self._decided_at = -math.inf

    def observe(self, now: float, seconds: float, num_running: int, kv_usage: float, busy: float) -> None:
        """Take a step: its seconds, the share of KV blocks in use, and step time over wall time, smoothed."""
        if self._latency is None:
            self._latency = seconds
        self._latency += _SMOOTHING * (seconds - self._latency)
        if now - self._decided_at >= GOVERNOR_PERIOD_S:
            self._usage_each *= math.exp((self._decided_at - now) / _MEMORY_S)
            self._decided_at = now
            self.max_num_seqs = self._review(self._latency, num_running, kv_usage, busy)

    def _review(self, latency: float, num_running: int, kv_usage: float, busy: float) -> int:
        limit, running = self.max_num_seqs, max(num_running, 1)
        slowness = 0.0 if self.target_s is None else latency / self.target_s
        usage_each = max(kv_usage, _NO_USE) / running
        self._usage_each = max(self._usage_each, usage_each)
        if kv_usage > KV_HIGH or slowness > 1.0:
            fitting = KV_GOAL / usage_each if kv_usage > KV_HIGH else limit
            goal = math.floor(min(running / max(slowness, 1.0), fitting, limit))
            return max(goal, math.floor(_MOST_LOWERED * min(limit, running)), 1)
        if kv_usage < KV_LOW and slowness < _LATENCY_LOW and (busy < BUSY_LOW or num_running >= limit):
            fitting = math.floor(KV_GOAL / self._usage_each)
            return max(min(limit + max(self._most // 32, 1), self._most, fitting), limit)
        return limit


class PressureController:
    """Chooser of the weights of the next step (after MorphServe, arXiv 2506.02006).

    Pressure begins above a limit, and ends `HOLD_S` after both values fell well below. Latency is the larger of the
    wait of the oldest request that never started, and the smoothed time of decoding steps.
    """

    def __init__(self, max_kv_usage: float, max_latency_s: float) -> None:
        self.is_on = False
        self._max_kv_usage, self._max_latency_s = max_kv_usage, max_latency_s
        self._step_s = 0.0
        self._stepped_at = self._pressed_at = -math.inf

    def observe_step(self, now: float, seconds: float) -> None:
        if now - self._stepped_at > HOLD_S:
            self._step_s = 0.0
        self._step_s += _SMOOTHING * (seconds - self._step_s)
        self._stepped_at = now

    def decide(self, now: float, kv_usage: float, wait_s: float) -> bool:
        """`kv_usage`: share of KV blocks in use."""
        memory = kv_usage / self._max_kv_usage
        latency = wait_s / self._max_latency_s
        if now - self._stepped_at <= HOLD_S:
            latency = max(latency, self._step_s / self._max_latency_s)
        is_relieved = memory <= MEMORY_RELIEVED and latency <= LATENCY_RELIEVED
        if memory > 1.0 or latency > 1.0 or (self.is_on and not is_relieved):
            self._pressed_at = now
        self.is_on = now - self._pressed_at < HOLD_S
        return self.is_on


class StepControl:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._keep_free = int(state.config.watermark * state.kv.num_blocks)
        self.estimate = ServiceEstimate(state.step_time, state.config.max_num_batched_tokens)
        self._paced_time = StepTime()  # by all tokens of a step, while rows have a time per output token
        self._last_applied: float | None = None
        self._busy = 0.0
        self.reconfigure()

    def reconfigure(self) -> None:
        """Take the settings of the state. The strategy and the controllers begin anew."""
        config = self._state.config
        self.estimate.step_tokens = config.max_num_batched_tokens
        self.strategy = STRATEGIES[config.scheduling_strategy](config)
        self.token_budget = config.max_num_batched_tokens
        self.max_num_seqs = config.max_num_seqs
        self._tpot: TpotController | None = None
        if config.target_tpot_ms is not None:
            self._tpot = TpotController(1e-3 * config.target_tpot_ms, self.token_budget, MIN_TOKEN_BUDGET)
        self._governor: SeqsGovernor | None = None
        if config.enable_seqs_governor:
            target_ms = config.governor_target_latency_ms
            self._governor = SeqsGovernor(self.max_num_seqs, None if target_ms is None else 1e-3 * target_ms)
        self._pressure: PressureController | None = None
        if config.has_quantized_copy:
            self._pressure = PressureController(config.pressure_memory, 1e-3 * config.pressure_latency_ms)

    def expect_weights(self, now: float) -> None:
        """Tell the prefix cache the next step's weights, unless a CRITICAL request enters."""
        state = self._state
        if self._pressure is None:
            return
        oldest = state.waiting.oldest_arrival
        is_on = self._pressure.decide(now, self._kv_usage(), 0.0 if oldest is None else now - oldest)
        keeps_full = (state.columns.keeps_full & state.columns.running).any()
        state.kv.prefixes.weights = "quantized" if is_on and not keeps_full else "full"

    def choose_weights(self, batch: ScheduledBatch, rows: RowArray) -> ScheduledBatch:
        """Return the batch with its weights. Rows of several weights publish no further blocks."""
        if self._pressure is None:
            return batch
        state = self._state
        keeps_full = any(new.request.keeps_full_weights for new in batch.new_rows)
        if state.kv.prefixes.weights == "quantized" and not keeps_full:
            batch = replace(batch, weights="quantized")
            state.stats.num_quantized_steps += 1
        for row in state.columns.note_weights(rows, batch.start_positions, batch.weights).tolist():
            state.kv.prefixes.drop_announced(row)
        return batch

    def _kv_usage(self) -> float:
        return 1.0 - self._state.kv.num_free_blocks / self._state.kv.num_blocks

    def limits(self, now: float, slice_s: float | None = None) -> StepLimits:
        """Return the limits of a step; `slice_s`: its longest time."""
        state, config, num_rows = self._state, self._state.config, self._state.config.num_rows
        num_running = state.columns.num_running
        budget, max_decodes = self.token_budget, num_running
        if slice_s is not None:
            fitting = max(state.step_time.most_tokens(slice_s), config.least_cut_tokens)
            budget = min(budget, num_running + fitting)
        self.estimate.step_tokens = config.max_num_batched_tokens
        if state.columns.num_paced and (fitting := self._paced_tokens(now)):
            if self._paced_time.seconds_per_token:  # else nothing says that fewer rows take less time
                max_decodes = min(num_running, max(fitting - _LEAST_CHUNK, _LEAST_CHUNK))
            budget = min(budget, max(fitting, max_decodes + _LEAST_CHUNK))
            self.estimate.step_tokens = max(budget - max_decodes, 1)
        budget = max(budget, max_decodes + 1)  # each row decodes, one prompt progresses
        max_joins = 0
        if state.waiting:
            oldest = state.waiting.oldest_arrival
            most = max(self.max_num_seqs, num_running)  # a lowered limit ends no request
            view = JoinView(num_running, state.waiting.num_new, now if oldest is None else oldest, most)
            max_joins = self.strategy.max_joins(now, view)
        return StepLimits(
            min(budget, max(config.max_num_batched_tokens, num_running)),  # rows outlast a lowered limit
            config.long_prefill_token_threshold or config.max_num_batched_tokens,
            min(self.max_num_seqs, num_rows),
            max_joins,
            max(SPARE_LOGITS, num_rows - num_running),  # memory was measured with logits for every row
            self._keep_free,
            slice_s,
            max_decodes,
        )

    def _paced_tokens(self, now: float) -> int:
        """Return the most tokens of a step that keeps the times per output token of decoding rows; 0: any.

        A late row takes less than its time, but not where no step is so short. No prompt is cut for lower classes.
        """
        columns = self._state.columns
        rows = ((columns.tpots < np.inf) & (columns.first_token_times < np.inf)).nonzero()[0]
        if len(rows):
            rows = rows[columns.classes[rows] <= self._best_prompt_class()]
        if not len(rows):
            return 0
        tpots = columns.tpots[rows]
        paces_s = np.clip(columns.next_due(rows) - now, _LEAST_PACE * tpots, tpots).min(), tpots.min()
        fitting = (self._paced_time.most_tokens(float(pace_s), _PACE_CAUTION) for pace_s in paces_s)
        return next((num_tokens for num_tokens in fitting if num_tokens > 0), 0)

    def _best_prompt_class(self) -> int:
        """Return the best class of the prompts under way and of the first request that waits beside a free row."""
        columns, waiting = self._state.columns, self._state.waiting
        starts = columns.num_computed_tokens + columns.num_inflight_tokens
        prompts = columns.running & (starts < columns.num_entered_tokens)
        first = next(waiting.candidates(with_new=True), None) if columns.free_rows else None
        return int(columns.classes[prompts].min(initial=Priority.LOW if first is None else first.service_class))

    def observe_step(self, step: InFlightStep, batch: ScheduledBatch, outputs: StepOutputs, now: float) -> None:
        """Update estimates and limits. A step begins when the previous one ends."""
        state = self._state
        last = step.scheduled_at if self._last_applied is None else self._last_applied
        seconds = max(now - max(step.scheduled_at, last), 0.0)
        if state.turns is not None and step.turn is not None:
            state.turns.pay(step.turn, batch.num_tokens, seconds)
        steps_per_token = 1.0  # mean over the rows: with drafts, a row may get several tokens
        if step.has_drafts and (counts := Counter(outputs.requests)):
            steps_per_token = sum(1.0 / count for count in counts.values()) / len(counts)
        token_s = seconds * steps_per_token
        state.step_time.observe(batch.num_tokens - batch.num_decodes, seconds, now, steps_per_token)
        if state.speculation is not None and not step.started:
            interval = now - last if step.has_waited else seconds
            state.speculation.observe_step(batch, interval, has_waited=step.has_waited)
        if state.columns.num_paced:
            self._paced_time.observe(batch.num_tokens, seconds, now)
        num_started_tokens = sum([request.num_prompt_tokens for request in step.started])
        self.estimate.observe_step(now, num_started_tokens, state.waiting.num_new)
        if step.started:
            oldest = min([request.arrival_time for request in step.started])
            self.strategy.observe_batch(max(now - oldest, 0.0))
        self._last_applied = now
        if self._pressure is not None and batch.num_decodes:
            self._pressure.observe_step(now, token_s)
        if self._tpot is not None:
            self._tpot.observe(token_s, batch.num_decodes, batch.num_tokens)
            self.token_budget = self._tpot.budget
        if self._governor is not None:
            if (elapsed := now - last) > 0.0:
                weight = 1.0 - math.exp(-elapsed / _BUSY_SECONDS)
                self._busy += weight * (min(seconds / elapsed, 1.0) - self._busy)
            self._governor.observe(now, token_s, state.columns.num_running, self._kv_usage(), self._busy)
            self.max_num_seqs = self._governor.max_num_seqs
