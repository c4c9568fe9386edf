"""Feedback control of two knobs: the token budget of a step, and the number of running requests."""

from __future__ import annotations

import math

_GAIN = 0.2  # of the integrator: part of the error that one step corrects
_AIM = 0.97  # of the target, so that the dead band ends at the target
_DEAD_BAND = 0.03  # to both sides of the aim, within which nothing moves
_MAX_CHANGE = 0.25  # of the logarithm, in one step
_LIMITED = 0.9  # of the budget: a step that used less says nothing about a larger one

KV_HIGH = 0.90
KV_GOAL = 0.85
KV_LOW = 0.80
BUSY_LOW = 0.85
GOVERNOR_PERIOD_S = 0.5
_LATENCY_LOW = 0.9  # of the target
_MEMORY_S = 30.0  # in which the largest use of late fades to a third
_NO_USE = 1e-6  # of the blocks: less counts as this
_MOST_LOWERED = 0.75  # of what runs is left by one decision
_SMOOTHING = 0.2  # weight of the newest step


class TpotController:
    """Moves the token budget so that a step with decoding rows takes `target_s`, which then is their TPOT.

    Integral control of the budget's logarithm, clamped:  ln B ← ln B + gain · ln(0.97 · target / step time)

    In a step that fills its budget, the time's relative answer to the budget, d ln t / d ln B, is between 0 and 1
    whatever the device, so the loop gain is at most 0.2, and it settles without overshoot even when the answer is
    two steps late (the roots of z² - z + g are real for g ≤ 1/4). Anti-windup: the clamped value is the state (no
    sum grows behind it), and the budget rises only after a step that used it.
    """

    __slots__ = ("_log_budget", "_max_budget", "_min_budget", "target_s")

    def __init__(self, target_s: float, max_budget: int, min_budget: int) -> None:
        """Budgets in tokens."""
        self.target_s = target_s
        self._max_budget = max_budget
        self._min_budget = min(min_budget, max_budget)
        self._log_budget = math.log(max_budget)

    @property
    def budget(self) -> int:
        return min(max(round(math.exp(self._log_budget)), self._min_budget), self._max_budget)

    def observe(self, step_seconds: float, num_decodes: int, num_tokens: int) -> int:
        """After a step: the budget of the next one, in tokens. A step without decoding rows has no TPOT."""
        if num_decodes < 1 or step_seconds <= 0.0:
            return self.budget
        error = math.log(_AIM * self.target_s / step_seconds)
        if abs(error) < _DEAD_BAND or (error > 0.0 and num_tokens < _LIMITED * self.budget):
            return self.budget
        change = min(max(_GAIN * error, -_MAX_CHANGE), _MAX_CHANGE)
        log_budget = self._log_budget + change
        self._log_budget = min(max(log_budget, math.log(self._min_budget)), math.log(self._max_budget))
        return self.budget


class SeqsGovernor:
    """Moves the number of running requests between 1 and `max_num_seqs`.

        lower    KV use over 90 %, or smoothed step time over its target
        raise    the device is under 85 % busy, or there is room in both; never where KV use would pass 85 %
        keep     in the band between (80 to 90 % of the blocks, 0.9 to 1 of the target)

    "Room in both" is why it raises a busy device too, if the limit is what holds requests back: under load a device
    is always busy, and a limit that was lowered once would stay low.

    Running requests leave only when they end, long after the limit was lowered, so a law that lowers as long as KV
    use is high would swing. The governor computes where it wants to be from what runs now: at the present blocks per
    request, as many as use 85 %; at the present step time per request, as many as meet the target. It decides every
    half second: down to that, but by no more than a quarter at once; up by 1/32 of `max_num_seqs`, as far as the most
    blocks per request of late (half a minute) allow, since young requests hold less than they will.
    """

    def __init__(self, max_num_seqs: int, target_latency_s: float | None = None) -> None:
        self._most = max_num_seqs
        self.target_s = target_latency_s
        self._limit = max_num_seqs
        self._latency: float | None = None
        self._usage_each = 0.0  # of the blocks, by one request: the largest of late, fading
        self._last = -math.inf  # decision
        self._stride = max(max_num_seqs // 32, 1)

    @property
    def max_num_seqs(self) -> int:
        return self._limit

    def observe(self, kv_usage: float, step_seconds: float, busy: float, num_running: int, now: float) -> int:
        """After a step: the limit of running requests. `kv_usage` and `busy` are fractions."""
        if self._latency is None:
            self._latency = step_seconds
        self._latency += _SMOOTHING * (step_seconds - self._latency)
        if now - self._last >= GOVERNOR_PERIOD_S:
            self._usage_each *= math.exp((self._last - now) / _MEMORY_S)
            self._last = now
            self._limit = self._review(kv_usage, self._latency, busy, num_running)
        return self._limit

    def _review(self, kv_usage: float, latency: float, busy: float, num_running: int) -> int:
        slowness = 0.0 if self.target_s is None else latency / self.target_s
        running = max(num_running, 1)
        usage_each = max(kv_usage, _NO_USE) / running
        self._usage_each = max(self._usage_each, usage_each)
        if kv_usage > KV_HIGH or slowness > 1.0:
            goal = math.floor(running / max(slowness, 1.0))
            goal = min(goal, math.floor(KV_GOAL / usage_each)) if kv_usage > KV_HIGH else goal
            least = math.floor(_MOST_LOWERED * min(self._limit, running))
            return max(min(goal, self._limit), least, 1)
        has_room = kv_usage < KV_LOW and slowness < _LATENCY_LOW
        if has_room and (busy < BUSY_LOW or num_running >= self._limit):
            fitting = math.floor(KV_GOAL / self._usage_each)
            return max(min(self._limit + self._stride, self._most, fitting), self._limit)
        return self._limit
