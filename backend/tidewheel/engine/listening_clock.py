from __future__ import annotations

import time
from collections.abc import Callable

MAX_GAP_S = 1.0


class ListeningClock:
    """Seconds in which this process could hear others, to measure their silence.

    Read it in every turn of a loop. A longer gap between two readings, such as a pause of this process, counts as
    `MAX_GAP_S`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._paused_s = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._paused_s += max(0.0, now - self._last - MAX_GAP_S)
        self._last = now
        return now - self._paused_s
