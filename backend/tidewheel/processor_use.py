import contextlib
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

PERIOD_S = 0.25  # between readings
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12  # of /proc/PID/stat, after the name
_FREE = (4, 5)  # of a line of /proc/stat: idle, and waiting for a disk
_WORK = (1, 2, 3, 6, 7)  # user, niced, system, interrupts


class ProcessorUse(NamedTuple):
    """Shares of one processor over a period, so that two busy processors are 2.0."""

    used: float  # by the processes asked about
    idle: float  # of the processors that this process may use
    waited: float = 0.0  # by threads of this process that were ready to run
    niced: float = 0.0  # by processes that give way, unless this one does too

    @property
    def free(self) -> int:
        """Processors that the processes asked about use or may have."""
        return int(self.used + self.idle + self.niced + 0.5)


class ProcessorMeter:
    """Reader of `ProcessorUse` since the last reading, by this process and `pids`."""

    def __init__(self, *pids: int, counts_waits: bool = False, period_s: float = PERIOD_S) -> None:
        self._pids, self._counts_waits, self._period_s = pids, counts_waits, period_s
        self._names = {f"cpu{number}".encode() for number in os.sched_getaffinity(0)}
        self._read_at, self._seconds = time.monotonic(), self._read()

    def read(self) -> ProcessorUse | None:
        """Return the use since the last reading; None within the period, or where /proc does not say."""
        period_s = time.monotonic() - self._read_at
        if period_s < self._period_s:
            return None
        before, self._seconds = self._seconds, self._read()
        self._read_at += period_s
        pairs = zip(self._seconds, before, strict=False)  # empty where /proc does not say
        shares = [max(now - then, 0.0) / period_s for now, then in pairs]
        if not shares:
            return None
        used, waited, idle, user, niced, work = shares
        # Linux counts the system calls of processes that give way with all others'.
        niced *= max(work - used, 0.0) / (niced + max(user - used, 0.0) or 1.0)
        return ProcessorUse(used, idle, waited, niced)

    def _read(self) -> tuple[float, ...]:
        try:
            used = time.process_time() + sum(map(_seconds_of, self._pids))
            return used, sum(_waited_seconds()) if self._counts_waits else 0.0, *_seconds_of_processors(self._names)
        except (OSError, ValueError, IndexError):
            return ()


def _seconds_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0.0
    return (int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK_S


def _seconds_of_processors(names: Collection[bytes]) -> tuple[float, float, float, float]:
    """Return the seconds in which they were idle, ran programs, ran those that give way, and ran anything."""
    lines = [line for line in map(bytes.split, Path("/proc/stat").read_bytes().splitlines()) if line[0] in names]
    idle, user, niced, work = (
        sum(int(line[field]) for line in lines for field in fields) * _TICK_S for fields in (_FREE, (1,), (2,), _WORK)
    )
    return idle, user, 0.0 if os.getpriority(os.PRIO_PROCESS, 0) > 0 else niced, work


def _waited_seconds() -> Iterator[float]:
    """Yield the seconds that each living thread of this process spent in run queues."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield int((thread / "schedstat").read_bytes().split()[1]) * 1e-9
