"""Heartbeat of an engine's step loop: a memory page in the engine's folder."""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tidewheel.engine.folder import HEARTBEAT, Status, read_status
from tidewheel.health_endpoint import DRAINING, READY, Readiness
from tidewheel_process.locked_folder import LOCK, is_locked

UNUSED_S = 2.0  # after a front end's end, until another takes over
MAX_GAP_S = 1.0
# Silence after which an engine counts as hung, or is killed: the longer of seconds and predicted step times.
HUNG_S, HUNG_STEPS = 5.0, 10.0
END_S, END_STEPS = 30.0, 20.0

_LAYOUT = struct.Struct("<Qd?I")


class Beat(NamedTuple):
    sequence: int
    expected_s: float  # until the next beat
    is_stepping: bool
    num_front_ends: int


class Heartbeat:
    """Writer of the heartbeat. A beat makes no system call."""

    def __init__(self, engine_dir: Path) -> None:
        self._sequence = 0
        temporary = engine_dir / f"{HEARTBEAT}.{os.getpid()}"
        with temporary.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)  # a write beyond a full disk would be SIGBUS
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.beat(None, 0)
        temporary.replace(engine_dir / HEARTBEAT)

    def beat(self, expected_s: float | None, num_front_ends: int) -> None:
        """Record a turn of the step loop. `expected_s`: seconds to the next beat; None: idle."""
        self._sequence += 1
        is_stepping = expected_s is not None
        _LAYOUT.pack_into(self._memory, 0, self._sequence, expected_s or 0.0, is_stepping, num_front_ends)


class ListeningClock:
    """Clock in seconds for the silence of other processes. Pauses of this process count at most `MAX_GAP_S` each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._paused_s = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._paused_s += max(0.0, now - self._last - MAX_GAP_S)
        self._last = now
        return now - self._paused_s


class HangWatch:
    """Reader of a heartbeat that tells whether the engine hangs; pauses of this process do not count."""

    def __init__(self, engine_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine_dir = engine_dir
        self._listened = ListeningClock(clock)
        self._memory: mmap.mmap | None = None
        with contextlib.suppress(OSError, ValueError), (engine_dir / HEARTBEAT).open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._beat = self._read()
        self._heard_at = self._listened()
        self.silence_s = 0.0

    @property
    def is_hung(self) -> bool:
        return self._exceeds(HUNG_S, HUNG_STEPS)

    @property
    def must_end(self) -> bool:
        return self._exceeds(END_S, END_STEPS)

    def look(self) -> None:
        now = self._listened()
        self.silence_s = now - self._heard_at
        beat = self._read()
        status = read_status(self._engine_dir) if self.is_hung else None
        if beat != self._beat or (status is not None and status.stage):
            self._beat, self._heard_at, self.silence_s = beat, now, 0.0

    @property
    def has_front_ends(self) -> bool:
        return self._beat is None or self._beat.num_front_ends > 0

    def describe(self) -> str:
        doing = "in a step" if self._beat is not None and self._beat.is_stepping else "idle"
        return f"its loop has not turned for {self.silence_s:.0f} s ({doing})"

    def _exceeds(self, seconds: float, steps: float) -> bool:
        return self._beat is not None and self.silence_s >= max(seconds, steps * self._beat.expected_s)

    def _read(self) -> Beat | None:
        return None if self._memory is None else Beat(*_LAYOUT.unpack_from(self._memory))


class EngineWatch:
    """Reader of the heartbeat of a model's current engine. Call `look` at least every second."""

    def __init__(self, current: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`current`: link to the engine's folder."""
        self._current = current
        self._clock = clock
        self._process = (0, 0)
        self._hang: HangWatch | None = None
        self._used_at = clock()
        self._was_ready = False

    def look(self) -> Readiness | None:
        """Return the engine's readiness; None without front ends, or before the engine was ready."""
        status = read_status(self._current)
        if status is None:
            return None
        if status.is_given_up and self._was_ready:
            return Readiness("given up", status.message)
        is_wanted = is_locked(self._current / LOCK)
        if status.is_serving:
            self._was_ready = True
            return self._judge(status, is_wanted)
        self._was_ready = self._was_ready and is_wanted
        if not self._was_ready:
            return None
        if status.state in ("starting", "loading") and status.is_alive:
            return Readiness("reloading", f"the engine loads again {status.stage}".rstrip())
        return Readiness("stopped", status.message or "the engine process ended")

    def _judge(self, status: Status, is_wanted: bool) -> Readiness:
        if self._hang is None or self._process != (status.pid, status.start_ticks):
            self._process = status.pid, status.start_ticks
            self._hang = HangWatch(self._current.resolve(), clock=self._clock)
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
