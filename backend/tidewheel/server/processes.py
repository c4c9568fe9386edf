"""Linux processes, through /proc and pidfds, and signals to stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02
MAX_DESCRIPTORS = 1 << 16
MANY_DESCRIPTORS = 1 << 14  # more than clients are expected to take
GOOD_DESCRIPTORS = 1024  # Triton takes 65 with two models, and one for each connection
_libc = ctypes.CDLL(None, use_errno=True)
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Process(NamedTuple):
    pid: int
    parent: int
    name: str  # first 15 bytes
    state: str  # "Z": not yet reaped
    started: int  # clock ticks since boot: with the pid, an identity


def read(pid: int) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")  # any user's name
    except OSError:
        return None
    # The name in parentheses may hold anything.
    name, rest = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :]
    fields = rest.split()
    return Process(pid, int(fields[1]), name, fields[0], int(fields[19]))


def is_alive(process: Process) -> bool:
    now = read(process.pid)
    return now is not None and now.state != "Z" and now.started == process.started


def snapshot() -> list[Process]:
    found = (read(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None]


def children(pid: int) -> list[Process]:
    return [process for process in snapshot() if process.parent == pid]


def descendants(pid: int) -> list[Process]:
    """Return the living processes below `pid`."""
    below: dict[int, list[Process]] = {}
    for process in snapshot():
        below.setdefault(process.parent, []).append(process)
    found, todo = [], [pid]
    while todo:
        for process in below.get(todo.pop(), ()):
            todo.append(process.pid)
            if process.state != "Z":
                found.append(process)
    return found


def with_folder(name: str, folder: str) -> list[Process]:
    """Return the living processes, of those that may be asked, whose variable named the folder or one below it."""
    same = f"{name}={folder}".encode()
    below = same + b"/"

    def has_it(pid: int) -> bool:
        return any(one == same or one.startswith(below) for one in _environment(pid))

    return [process for process in snapshot() if process.state != "Z" and has_it(process.pid)]


def arguments(pid: int) -> list[str]:
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return []


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


class Watch:
    """Watcher of a process's end. `fileno` is a pidfd; if the kernel has none, poll `has_ended`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid
        self.fileno: int | None = None
        with contextlib.suppress(OSError):
            self.fileno = os.pidfd_open(process.pid)

    def has_ended(self) -> bool:
        return not is_alive(self._process)

    def close(self) -> None:
        if self.fileno is not None:
            os.close(self.fileno)
            self.fileno = None


def adopt_orphans() -> None:
    """Adopt descendants whose parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Ask, in a child before exec, for SIGTERM when the parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def reap(*, keep: int) -> None:
    """Reap ended children except `keep`."""
    for process in children(os.getpid()):
        if process.state == "Z" and process.pid != keep:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def signal_all(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files, which its children inherit, as far as it may; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_DESCRIPTORS
    limit = max(soft, MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


class StopSignals:
    """Counter of SIGINT, SIGTERM, SIGHUP and SIGQUIT, which make `fileno` readable. Main thread only."""

    def __init__(self) -> None:
        self.count = 0
        self._reader, self._writer = socket.socketpair()
        self._before: dict[signal.Signals, object] = {}
        self._wakeup_before = -1

    def __enter__(self) -> StopSignals:
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _STOP:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def stop(self) -> None:
        """Ask to stop, as the first signal does. Later calls, from any thread, change nothing."""
        if not self.count:
            self.count = 1
            with contextlib.suppress(OSError):  # full, or closed: it is stopping anyway
                self._writer.send(b"\0")

    def clear(self) -> None:
        try:
            while self._reader.recv(64):
                pass
        except BlockingIOError:
            pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1
