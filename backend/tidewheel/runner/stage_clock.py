"""Duration of each load stage."""

from __future__ import annotations

import time
from collections.abc import Callable

from tidewheel.models.base import Progress

FIRST = "start"


class StageClock:
    """Forwards and times progress. A stage ends when another begins."""

    def __init__(self, report: Progress, clock: Callable[[], float] = time.perf_counter) -> None:
        self._report = report
        self._clock = clock
        self._stage = FIRST
        self._began = clock()
        self._seconds: dict[str, float] = {}

    def __call__(self, stage: str, fraction: float) -> None:
        if stage != self._stage:
            self._end_stage()
            self._stage = stage
        self._report(stage, fraction)

    def seconds(self) -> dict[str, float]:
        """Return seconds by stage, in order."""
        self._end_stage()
        return dict(self._seconds)

    def _end_stage(self) -> None:
        now = self._clock()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._began
        self._began = now
