"""How long a step takes, learned from the steps: what recomputing and waiting will cost."""

from __future__ import annotations

import math

_FORGET = 0.98  # weight that a step keeps at the next one: about the last 50 count
_MIN_STEPS = 8
_TIME_CONSTANT_S = 10.0  # in which the steps that were seen lose two thirds of their weight as evidence
_MAX_FACTOR = 2.0  # a step counts as this many expected ones at most: a pause says nothing of the next step


class StepTime:
    """``seconds ≈ overhead + seconds_per_token · chunk tokens``: least squares with exponential forgetting.

    Chunk tokens are those of prompts (and of requests that are computed again). Decoding rows cost about the same in
    every step, so they are part of the overhead, which follows their number as old steps are forgotten. Attention
    over what a prompt has computed before is in the slope only on average.
    Weighted means and covariances are updated in place (West, "Updating mean and variance estimates", CACM 1979).
    """

    __slots__ = ("_cov", "_last", "_mean_seconds", "_mean_tokens", "_var", "_weight", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self._last = 0.0  # when the last step ended, seconds
        self._weight = 0.0
        self._mean_tokens = 0.0
        self._mean_seconds = 0.0
        self._var = 0.0  # weighted sum of squared deviations of the tokens
        self._cov = 0.0  # and of deviations of tokens and seconds

    @property
    def is_known(self) -> bool:
        """Enough steps were seen, and their chunks differed in length."""
        return self.num_steps >= _MIN_STEPS and self._var > self._weight

    @property
    def seconds_per_token(self) -> float:
        """Of a chunk; 0 until known."""
        return max(self._cov / self._var, 0.0) if self.is_known else 0.0

    def is_fresh(self, now: float) -> bool:
        """Whether enough steps were seen lately to predict the next ones."""
        return self._weight * self._fade(now) >= _MIN_STEPS

    def observe(self, num_chunk_tokens: int, seconds: float, now: float) -> None:
        """Learn from a step that has ended now."""
        expected = self.seconds(num_chunk_tokens)
        if self.num_steps >= _MIN_STEPS and expected > 0.0:
            seconds = min(seconds, _MAX_FACTOR * expected)
        self.num_steps += 1
        forget = _FORGET * self._fade(now - seconds)  # the time without a step counts
        self._last = now
        self._weight = self._weight * forget + 1.0
        tokens_off = num_chunk_tokens - self._mean_tokens
        seconds_off = seconds - self._mean_seconds
        gain = 1.0 / self._weight
        self._mean_tokens += tokens_off * gain
        self._mean_seconds += seconds_off * gain
        rest = 1.0 - gain
        self._var = self._var * forget + tokens_off * tokens_off * rest
        self._cov = self._cov * forget + tokens_off * seconds_off * rest

    def _fade(self, now: float) -> float:
        return math.exp(-max(now - self._last, 0.0) / _TIME_CONSTANT_S)

    def seconds(self, num_chunk_tokens: int) -> float:
        """Of a step with so many chunk tokens; 0 before the first step, the mean until the slope is known."""
        return max(self._mean_seconds + self.seconds_per_token * (num_chunk_tokens - self._mean_tokens), 0.0)
