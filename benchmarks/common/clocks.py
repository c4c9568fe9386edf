"""Real time, processor time, and time that only waiting moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    def __call__(self) -> float: ...

    def wait_until(self, moment: float) -> None: ...


class WallClock:
    def __call__(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            time.sleep(left)


class CpuClock:
    """Processor seconds plus waits, which it skips: wall time on an idle machine, whatever else runs."""

    def __init__(self, seconds: Callable[[], float] = time.process_time) -> None:
        self._seconds = seconds
        self._skipped = 0.0

    def __call__(self) -> float:
        return self._seconds() + self._skipped

    def wait_until(self, moment: float) -> None:
        self._skipped += max(moment - self(), 0.0)


class ManualClock:
    """Time that only waiting moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)
