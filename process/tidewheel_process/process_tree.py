import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

import psutil

from tidewheel_process.child import wait_until

_GONE = (psutil.NoSuchProcess, psutil.AccessDenied)  # ZombieProcess is a NoSuchProcess


def children(pid: int) -> list[psutil.Process]:
    """Return a process's children, zombies included."""
    return _processes(_pids_by_parent()[pid])


def descendants(pid: int) -> list[psutil.Process]:
    """Return the living processes below `pid`."""
    by_parent, found, todo = _pids_by_parent(), [], [pid]
    while todo:
        below = by_parent.pop(todo.pop(), [])
        found += _processes(below)
        todo += below
    return [process for process in found if is_alive(process)]


def _pids_by_parent() -> defaultdict[int, list[int]]:
    # psutil's `children` fails where the processes of other users are hidden (hidepid=1).
    found: defaultdict[int, list[int]] = defaultdict(list)
    for pid in psutil.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            found[int(stat.rpartition(b")")[2].split()[1])].append(pid)
    return found


def _processes(pids: Iterable[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(*_GONE):
            found.append(psutil.Process(pid))
    return found


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs: neither gone, nor a zombie, nor replaced under its pid."""
    return status(process) not in ("", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) and bool(process.is_running())


def status(process: psutil.Process) -> str:
    """Return psutil's status of a process; empty if gone."""
    with contextlib.suppress(*_GONE):
        return str(process.status())
    return ""


def name(process: psutil.Process) -> str:
    """Return a process's name, of a zombie the first 15 bytes; empty if gone."""
    with contextlib.suppress(*_GONE):
        return str(process.name())
    return ""


def arguments(pid: int) -> list[str]:
    """Return a process's command line; empty if unreadable."""
    with contextlib.suppress(*_GONE):
        return list(psutil.Process(pid).cmdline())
    return []


def is_running(program: str) -> bool:
    return any(name(process) == program and is_alive(process) for process in psutil.process_iter())


def started_with(variable: str, folder: str) -> list[psutil.Process]:
    """Return this user's other processes whose environment has `folder` or a path below it in `variable`."""
    found = []
    for process in psutil.process_iter(["environ"]):
        value = (process.info["environ"] or {}).get(variable, "")  # None of another user's process
        if process.pid != os.getpid() and (value == folder or value.startswith(f"{folder}/")):
            found.append(process)
    return found


def signal_all(processes: Iterable[psutil.Process], number: Signals) -> None:
    for process in processes:
        with contextlib.suppress(*_GONE):
            process.send_signal(number)


def end_all(find: Callable[[], list[psutil.Process]], grace_s: float) -> None:
    """Send SIGTERM to all processes that `find` returns, and SIGKILL after `grace_s`."""
    # The second SIGKILL reaches children that were forked just before the first.
    for number in (SIGTERM, SIGKILL, SIGKILL):
        found = find()
        signal_all(found, number)
        wait_until(lambda these=found: not any(map(is_alive, these)), grace_s)  # type: ignore[misc]


def reap(*, keep: Iterable[int]) -> None:
    """Reap ended children and adopted orphans, except the pids to `keep`."""
    with contextlib.suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return  # which spares a look at all processes of the machine
    kept = set(keep)
    for process in children(os.getpid()):
        if process.pid not in kept and status(process) == psutil.STATUS_ZOMBIE:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
