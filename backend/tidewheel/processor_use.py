"""Seconds of processor time, as Linux counts them in /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12  # of /proc/PID/stat, after the name
_IDLE, _IO_WAIT = 4, 5  # of a line of /proc/stat


class ProcessorUse(NamedTuple):
    """Shares of one processor over a period, so that two busy processors are 2.0."""

    used: float  # by the processes asked about
    idle: float  # of the processors that this process may use
    waited: float = 0.0  # by threads of this process that were ready to run


class _Sums(NamedTuple):
    at: float
    used: float
    idle: float
    waited: float


class ProcessorMeter:
    """Reader of `ProcessorUse` since the last reading, for this process and others of the same server."""

    def __init__(self, others: tuple[int, ...] = (), *, counts_waits: bool = False) -> None:
        self._others = others
        self._counts_waits = counts_waits
        self._last = self._sums()

    def read(self) -> ProcessorUse | None:
        """Return the use since the last call; None where /proc does not say."""
        last, self._last = self._last, self._sums()
        if last is None or self._last is None or self._last.at <= last.at:
            return None
        at, *sums = (now - before for now, before in zip(self._last, last, strict=True))
        return ProcessorUse(*(max(seconds, 0.0) / at for seconds in sums))

    def _sums(self) -> _Sums | None:
        try:
            used = time.process_time() + sum(map(_seconds_of, self._others))
            return _Sums(time.monotonic(), used, _idle_seconds(), _waited_seconds() if self._counts_waits else 0.0)
        except (OSError, ValueError, IndexError):
            return None


def _seconds_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0.0
    return (int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK_S


def _idle_seconds() -> float:
    names = {f"cpu{number}".encode() for number in os.sched_getaffinity(0)}
    lines = (line.split() for line in Path("/proc/stat").read_bytes().splitlines() if line.startswith(b"cpu"))
    return sum(int(line[_IDLE]) + int(line[_IO_WAIT]) for line in lines if line[0] in names) * _TICK_S


def _waited_seconds() -> float:
    """Return the seconds that living threads of this process spent in run queues."""
    waited_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            waited_ns += int((thread / "schedstat").read_bytes().split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return waited_ns * 1e-9
