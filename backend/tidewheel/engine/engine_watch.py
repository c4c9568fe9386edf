from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tidewheel.engine.folder import Status, is_owned, read_status
from tidewheel.engine.heartbeat import HangLimits, HangWatch
from tidewheel.health_endpoint import DRAINING, READY, Readiness

UNUSED_S = 2.0  # after a front end's end, until another holds the lock and says hello


class EngineWatch:
    """Judge of the engine that serves a model, by files alone. Look at least every second."""

    def __init__(
        self, current: Path, limits: HangLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`current`: the link to the engine's folder."""
        self._current = current
        self._limits = limits
        self._clock = clock
        self._process = (0, 0)
        self._hang: HangWatch | None = None
        self._used_at = clock()
        self._was_ready = False

    def look(self) -> Readiness | None:
        """Return None for an engine that no front end asks for, or that has not been ready yet."""
        status = read_status(self._current)
        if status is None:
            return None
        if status.is_given_up and self._was_ready:
            return Readiness("given up", status.message)
        is_wanted = is_owned(self._current)
        if status.state == "ready" and status.is_alive:
            self._was_ready = True
            return self._judge(status, is_wanted)
        self._was_ready = self._was_ready and is_wanted
        return self._absent(status) if self._was_ready else None

    def _judge(self, status: Status, is_wanted: bool) -> Readiness:
        if self._hang is None or self._process != (status.pid, status.start_ticks):
            self._process = status.pid, status.start_ticks
            self._hang = HangWatch(self._current.resolve(), self._limits, self._clock)
        self._hang.look()
        now = self._clock()
        if is_wanted and self._hang.has_front_ends:
            self._used_at = now
        if status.is_draining:
            return DRAINING
        if self._hang.is_hung:
            return Readiness("hung", self._hang.describe())
        if now - self._used_at > UNUSED_S:
            return Readiness("stopped", "the front end of the engine is gone or says nothing")
        return READY

    def _absent(self, status: Status) -> Readiness:
        if status.state in ("starting", "loading") and status.is_alive:
            return Readiness("reloading", f"the engine loads again {status.stage}".rstrip())
        return Readiness("stopped", status.message or "the engine process ended")
