"""Feedback control of the token budget of a step and of the number of running requests."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from tidewheel.scheduler.config import SchedulerConfig

MIN_TOKEN_BUDGET = 16  # lower bound of the TPOT controller
KV_HIGH = 0.90
KV_GOAL = 0.85
KV_LOW = 0.80
BUSY_LOW = 0.85
GOVERNOR_PERIOD_S = 0.5

_GAIN = 0.2  # of the integrator: part of the error that one step corrects
_AIM = 0.97  # of the target, so that the dead band ends at the target
_DEAD_BAND = 0.03  # to both sides of the aim
_MAX_CHANGE = 0.25  # of the logarithm, in one step
_LIMITED = 0.9  # of the budget: a step that used less says nothing about a larger one
_LATENCY_LOW = 0.9  # of the target
_MEMORY_S = 30.0  # in which the largest use per request fades to a third
_NO_USE = 1e-6  # of the blocks: the least that counts
_MOST_LOWERED = 0.75  # of the running requests: the least that one decision leaves
_SMOOTHING = 0.2  # weight of the newest step


class AppliedStep(NamedTuple):
    """A step as controllers see it. Fractions are 0 to 1."""

    now: float  # seconds
    seconds: float
    num_decodes: int
    num_tokens: int
    num_running: int
    kv_usage: float  # fraction of the blocks
    busy: float  # step time over wall time, smoothed


class Knobs(NamedTuple):
    """Limits of the next step."""

    token_budget: int
    max_num_seqs: int


class Controller(Protocol):
    """Learns from every step, and sets one of the knobs."""

    def observe(self, step: AppliedStep) -> None: ...

    def set(self, knobs: Knobs) -> Knobs: ...


class TpotController:
    """Moves the token budget so that a step with decoding rows takes `target_s`, which then is their TPOT.

    Integral control of the budget's logarithm, clamped:  ln B ← ln B + gain · ln(0.97 · target / step time)

    In a step that fills its budget, the relative answer of time to budget, d ln t / d ln B, is between 0 and 1 on any
    device. So the loop gain is at most 0.2, and the budget settles without overshoot even when the answer is two
    steps late (the roots of z² - z + g are real for g ≤ 1/4). Anti-windup: the clamped value is the state, and the
    budget rises only after a step that used it.
    """

    def __init__(self, target_s: float, max_budget: int, min_budget: int) -> None:
        """Take budgets in tokens."""
        self.target_s = target_s
        self._max_budget = max_budget
        self._min_budget = min(min_budget, max_budget)
        self._exact_budget = float(max_budget)

    @property
    def budget(self) -> int:
        return round(self._exact_budget)

    def observe(self, step: AppliedStep) -> None:
        if step.num_decodes < 1 or step.seconds <= 0.0:
            return  # it has no TPOT
        error = math.log(_AIM * self.target_s / step.seconds)
        if abs(error) < _DEAD_BAND or (error > 0.0 and step.num_tokens < _LIMITED * self.budget):
            return
        moved = self._exact_budget * math.exp(min(max(_GAIN * error, -_MAX_CHANGE), _MAX_CHANGE))
        self._exact_budget = min(max(moved, self._min_budget), self._max_budget)

    def set(self, knobs: Knobs) -> Knobs:
        return knobs._replace(token_budget=self.budget)


class SeqsGovernor:
    """Moves the number of running requests between 1 and `max_num_seqs`.

        lower    KV use over 90 %, or smoothed step time over its target
        raise    both have room, and the device is under 85 % busy or the limit holds requests back
        keep     in the band between (80 to 90 % of the blocks, 0.9 to 1 of the target)

    A device under load is always busy: without the last condition, a limit that was lowered would stay low.

    Running requests leave only when they end, long after the limit was lowered, so a law that lowers as long as KV
    use is high would swing. The governor computes a goal instead: as many requests as use 85 % at the present blocks
    per request, and as meet the target at the present step time per request. It decides every half second. It lowers
    to the goal, by a quarter at most, and raises by 1/32 of `max_num_seqs`. The most blocks per request of the last
    half minute bound a raise to where KV use stays within 85 %, since young requests hold less than they will.
    """

    def __init__(self, max_num_seqs: int, target_latency_s: float | None = None) -> None:
        self.max_num_seqs = max_num_seqs
        self.target_s = target_latency_s
        self._most = max_num_seqs
        self._latency: float | None = None  # of a step, smoothed
        self._usage_each = 0.0  # largest recent share of the blocks in one request, fading
        self._decided_at = -math.inf

    def observe(self, step: AppliedStep) -> None:
        if self._latency is None:
            self._latency = step.seconds
        self._latency += _SMOOTHING * (step.seconds - self._latency)
        if step.now - self._decided_at >= GOVERNOR_PERIOD_S:
            self._usage_each *= math.exp((self._decided_at - step.now) / _MEMORY_S)
            self._decided_at = step.now
            self.max_num_seqs = self._review(step, self._latency)

    def set(self, knobs: Knobs) -> Knobs:
        return knobs._replace(max_num_seqs=self.max_num_seqs)

    def _review(self, step: AppliedStep, latency: float) -> int:
        limit, kv_usage, running = self.max_num_seqs, step.kv_usage, max(step.num_running, 1)
        slowness = 0.0 if self.target_s is None else latency / self.target_s
        usage_each = max(kv_usage, _NO_USE) / running
        self._usage_each = max(self._usage_each, usage_each)
        if kv_usage > KV_HIGH or slowness > 1.0:
            fitting = KV_GOAL / usage_each if kv_usage > KV_HIGH else limit
            goal = math.floor(min(running / max(slowness, 1.0), fitting, limit))
            return max(goal, math.floor(_MOST_LOWERED * min(limit, running)), 1)
        has_room = kv_usage < KV_LOW and slowness < _LATENCY_LOW
        if has_room and (step.busy < BUSY_LOW or step.num_running >= limit):
            fitting = math.floor(KV_GOAL / self._usage_each)
            return max(min(limit + max(self._most // 32, 1), self._most, fitting), limit)
        return limit


def make_controllers(config: SchedulerConfig) -> list[Controller]:
    controllers: list[Controller] = []
    if config.target_tpot_s is not None:
        controllers.append(TpotController(config.target_tpot_s, config.max_num_batched_tokens, MIN_TOKEN_BUDGET))
    if config.enable_seqs_governor:
        controllers.append(SeqsGovernor(config.max_num_seqs, config.governor_target_latency_s))
    return controllers
