"""How long a newcomer would wait for its first token."""

from __future__ import annotations

import math

from tidewheel.scheduler.step_time import StepTime

_TIME_CONSTANT_S = 10.0  # evidence that is older has lost two thirds of its weight
_MIN_SECONDS = 0.5  # of measured backlog, before a pace is believed


class ServiceEstimate:
    """Predicts waiting and prefill from the pace at which prompt tokens left the waiting set, and from step times.

    The pace is measured only while requests were left waiting: an engine with nothing to serve is not slow. All
    evidence ages by the clock, whether steps run or not. Where there is none, waiting and prefill count as 0: a
    request is refused for its deadline on fresh evidence alone.
    """

    __slots__ = ("_budget", "_last", "_seconds", "_seen_at", "_step_time", "_tokens")

    def __init__(self, step_time: StepTime, max_num_batched_tokens: int) -> None:
        self._step_time = step_time
        self._budget = max_num_batched_tokens
        self._last: float | None = None  # end of the last step, if it left requests waiting
        self._seen_at = 0.0  # when tokens and seconds were last added to
        self._tokens = 0.0  # that started under backlog, older ones faded
        self._seconds = 0.0  # of backlog, faded alike

    def observe_step(self, now: float, num_started_tokens: int, num_waiting: int) -> None:
        """Learn from a step: prompt tokens of the requests that entered in it, and the requests still waiting."""
        elapsed = 0.0 if self._last is None else max(now - self._last, 0.0)
        self._last = now if num_waiting else None
        if elapsed <= 0.0:
            return
        fade = self._fade(now)
        self._tokens = self._tokens * fade + num_started_tokens
        self._seconds = self._seconds * fade + elapsed
        self._seen_at = now

    def tokens_per_second(self, now: float) -> float | None:
        """Return the pace of the waiting set under backlog; None while there is no fresh evidence."""
        if self._seconds * self._fade(now) < _MIN_SECONDS or self._tokens <= 0.0:
            return None
        return self._tokens / self._seconds

    def queue_seconds(self, num_tokens_ahead: int, now: float, *, has_free_rows: bool) -> float:
        """Return the time until everything ahead has started.

        With rows free for all of it, prefill alone holds it up, however slow an earlier backlog was.
        """
        pace = self.tokens_per_second(now)
        if pace is None:
            return 0.0
        if has_free_rows and self._step_time.is_fresh(now):
            return min(num_tokens_ahead / pace, self.prefill_seconds(num_tokens_ahead, now))
        return num_tokens_ahead / pace

    def prefill_seconds(self, num_tokens: int, now: float) -> float:
        """Return the time of a prompt that has the budget of every step for itself; 0 without fresh evidence."""
        if not self._step_time.is_fresh(now):
            return 0.0
        whole, rest = divmod(num_tokens, self._budget)
        seconds = whole * self._step_time.seconds(self._budget)
        return seconds + self._step_time.seconds(rest) if rest else seconds

    def _fade(self, now: float) -> float:
        return math.exp(-max(now - self._seen_at, 0.0) / _TIME_CONSTANT_S)
