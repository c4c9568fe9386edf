from __future__ import annotations

import math

_FORGET = 0.98  # per step: about the last 50 count
_MIN_STEPS = 8
_TIME_CONSTANT_S = 10.0  # time constant of evidence
_MIN_BACKLOG_S = 0.5  # before a pace counts
_MAX_FACTOR = 2.0  # of the expected time: pauses predict nothing


def _fade(now: float, last: float) -> float:
    return math.exp(-max(now - last, 0.0) / _TIME_CONSTANT_S)


class StepTime:
    """Least squares with exponential forgetting: ``seconds ≈ overhead + seconds_per_token · chunk tokens``.

    Decoding rows are overhead. Attention over earlier chunks is part of the slope, on average. Weighted means and
    covariances are updated in place (West, "Updating mean and variance estimates", CACM 1979).
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._last = 0.0  # end of the last step
        self._weight = 0.0
        self._mean_tokens = 0.0
        self._mean_seconds = 0.0
        self._var = 0.0  # weighted sum of squared token deviations
        self._cov = 0.0  # same for tokens · seconds

    @property
    def seconds_per_token(self) -> float:
        """Slope; 0 until enough chunks differ."""
        is_known = self._num_steps >= _MIN_STEPS and self._var > self._weight
        return max(self._cov / self._var, 0.0) if is_known else 0.0

    def is_fresh(self, now: float) -> bool:
        return self._weight * _fade(now, self._last) >= _MIN_STEPS

    def observe(self, num_chunk_tokens: int, seconds: float, now: float) -> None:
        expected = self.seconds(num_chunk_tokens)
        if self._num_steps >= _MIN_STEPS and expected > 0.0:
            seconds = min(seconds, _MAX_FACTOR * expected)
        self._num_steps += 1
        forget = _FORGET * _fade(now - seconds, self._last)  # idle time counts
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

    def seconds(self, num_chunk_tokens: int) -> float:
        """Predict the step; 0 before any, the mean without a slope."""
        return max(self._mean_seconds + self.seconds_per_token * (num_chunk_tokens - self._mean_tokens), 0.0)

    def longest_seconds(self, num_chunk_tokens: int) -> float | None:
        """Predict the step as for `seconds`; without a slope, a token counts as much as a step. None before any."""
        if not self._num_steps:
            return None
        if self.seconds_per_token > 0.0:
            return self.seconds(num_chunk_tokens)
        return self._mean_seconds * max(num_chunk_tokens / max(self._mean_tokens, 1.0), 1.0)


class ServiceEstimate:
    """Waiting and prefill times, from step times and the pace of starts while requests wait. 0 without evidence."""

    def __init__(self, step_time: StepTime, max_num_batched_tokens: int) -> None:
        self._step_time = step_time
        self.max_num_batched_tokens = max_num_batched_tokens
        self._last: float | None = None  # end of the last step, if requests still waited
        self._seen_at = 0.0
        self._tokens = 0.0  # started under backlog, faded
        self._seconds = 0.0  # of backlog, faded

    def observe_step(self, now: float, num_started_tokens: int, num_waiting: int) -> None:
        elapsed = 0.0 if self._last is None else max(now - self._last, 0.0)
        self._last = now if num_waiting else None
        if elapsed > 0.0:
            fade = _fade(now, self._seen_at)
            self._tokens = self._tokens * fade + num_started_tokens
            self._seconds = self._seconds * fade + elapsed
            self._seen_at = now

    def tokens_per_second(self, now: float) -> float | None:
        if self._seconds * _fade(now, self._seen_at) < _MIN_BACKLOG_S or self._tokens <= 0.0:
            return None
        return self._tokens / self._seconds

    def queue_seconds(self, num_tokens_ahead: int, now: float, *, has_free_rows: bool) -> float:
        """Return the time until all tokens ahead have started: with free rows, at most their prefill."""
        pace = self.tokens_per_second(now)
        seconds = 0.0 if pace is None else num_tokens_ahead / pace
        if has_free_rows and self._step_time.is_fresh(now):
            seconds = min(seconds, self.prefill_seconds(num_tokens_ahead, now))
        return seconds

    def prefill_seconds(self, num_tokens: int, now: float) -> float:
        """Return the prefill time with the whole budget."""
        if not self._step_time.is_fresh(now):
            return 0.0
        whole, rest = divmod(num_tokens, self.max_num_batched_tokens)
        seconds = whole * self._step_time.seconds(self.max_num_batched_tokens)
        return seconds + self._step_time.seconds(rest) if rest else seconds


class PreemptionCost:
    """Choice between recompute and swap, by device time. vLLM (SOSP 2023, section 4.5) leaves it to the user.

    recompute    computed tokens · seconds per chunk token        learned by `StepTime`
    swap         2 · blocks · seconds per block                   out and in
    """

    def __init__(self, step_time: StepTime, swap_seconds_per_block: float | None) -> None:
        self._step_time = step_time
        self._swap_seconds_per_block = swap_seconds_per_block

    def should_swap(self, num_computed_tokens: int, num_blocks: int) -> bool:
        """Return False without tier or slope."""
        if self._swap_seconds_per_block is None:
            return False
        swap_seconds = 2.0 * num_blocks * self._swap_seconds_per_block
        return swap_seconds < num_computed_tokens * self._step_time.seconds_per_token
