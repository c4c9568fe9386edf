from __future__ import annotations

import math

MEMORY_LOW = 8 / 9  # of a limit: pressure is over below
LATENCY_LOW = 0.5
HOLD_S = 2.0  # without pressure until full weights compute again
SMOOTHING = 0.2


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
        self._step_s += SMOOTHING * (seconds - self._step_s)
        self._stepped_at = now

    def decide(self, now: float, kv_usage: float, wait_s: float) -> bool:
        """`kv_usage`: share of KV blocks in use."""
        memory = kv_usage / self._max_kv_usage
        latency = wait_s / self._max_latency_s
        if now - self._stepped_at <= HOLD_S:
            latency = max(latency, self._step_s / self._max_latency_s)
        if memory > 1.0 or latency > 1.0 or (self.is_on and (memory > MEMORY_LOW or latency > LATENCY_LOW)):
            self._pressed_at = now
        self.is_on = now - self._pressed_at < HOLD_S
        return self.is_on
