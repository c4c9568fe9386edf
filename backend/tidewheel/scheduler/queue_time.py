"""How long a newcomer would wait for its first token."""

from __future__ import annotations

import math

from tidewheel.scheduler.step_time import StepTime

_TIME_CONSTANT_S = 10.0  # what is older than this has lost two thirds of its weight
_MIN_SECONDS = 0.5  # of measured backlog, before a pace is believed


class ServiceEstimate:
    """Predicts waiting and prefill from the pace at which prompt tokens left the waiting set.

    The pace is measured only while requests were left waiting: an engine with nobody to serve is not slow. Until a
    backlog has been seen there is none to predict from, and the waiting time counts as 0: who is refused for a
    deadline that cannot be met is refused on evidence.
    """

    __slots__ = ("_budget", "_last", "_seconds", "_step_time", "_tokens")

    def __init__(self, step_time: StepTime, max_num_batched_tokens: int) -> None:
        self._step_time = step_time
        self._budget = max_num_batched_tokens
        self._last: float | None = None
        self._tokens = 0.0  # that started under backlog, older ones faded
        self._seconds = 0.0  # of backlog, faded alike

    def observe_step(self, now: float, num_started_tokens: int, num_waiting: int) -> None:
        """After a step: prompt tokens of the requests that entered in it, and the requests still waiting."""
        elapsed = 0.0 if self._last is None else max(now - self._last, 0.0)
        self._last = now if num_waiting else None
        if elapsed <= 0.0:
            return
        fade = math.exp(-elapsed / _TIME_CONSTANT_S)
        self._tokens = self._tokens * fade + num_started_tokens
        self._seconds = self._seconds * fade + elapsed

    @property
    def tokens_per_second(self) -> float | None:
        """Pace of the waiting set under backlog; None until it is known."""
        if self._seconds < _MIN_SECONDS or self._tokens <= 0.0:
            return None
        return self._tokens / self._seconds

    def queue_seconds(self, num_tokens_ahead: int) -> float:
        """Until everything ahead has started."""
        pace = self.tokens_per_second
        return 0.0 if pace is None else num_tokens_ahead / pace

    def prefill_seconds(self, num_tokens: int) -> float:
        """Of a prompt that has the budget of every step for itself."""
        whole, rest = divmod(num_tokens, self._budget)
        seconds = whole * self._step_time.seconds(self._budget)
        return seconds + self._step_time.seconds(rest) if rest else seconds

    def first_token_seconds(self, num_tokens: int, num_tokens_ahead: int) -> float:
        """From now to the first token of a newcomer with so many prompt tokens to compute."""
        return self.queue_seconds(num_tokens_ahead) + self.prefill_seconds(num_tokens)
