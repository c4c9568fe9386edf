"""Presence marks of front ends. A mark outlives a dead front end; an unload removes it."""

import contextlib
import os
import socket
import stat
import threading
from pathlib import Path
from typing import NamedTuple

from tidewheel.private_dir import private_dir, run_dir
from tidewheel_process.child import start_ticks

_FOLDER = "front_ends"
_COUNT = b"%08d "  # of open requests, before the model's name
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class PresenceMark(NamedTuple):
    model: str
    num_open: int  # requests without their last response


class Presence:
    """File that marks this front end as serving, with its number of open requests."""

    def __init__(self, model: str) -> None:
        """Write the mark. Raise `OSError`."""
        self._lock = threading.Lock()
        self._num_open = 0
        folder = private_dir(run_dir() / _FOLDER)
        _sweep(folder)
        self._path = _path(folder, os.getpid(), start_ticks(os.getpid()))
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(self._descriptor, _COUNT % 0 + model.encode())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def count(self, change: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._num_open += change
            os.pwrite(self._descriptor, _COUNT % self._num_open, 0)


def read_mark(pid: int, start_ticks: int) -> PresenceMark | None:
    """Return a process's presence mark, even after its death; None without one."""
    try:
        count, _, model = _path(run_dir() / _FOLDER, pid, start_ticks).read_text(encoding="utf-8").partition(" ")
        return PresenceMark(model, int(count))
    except (OSError, ValueError):
        return None


def _sweep(folder: Path) -> None:
    for mark in folder.glob("*-*"):
        if not Path("/proc", mark.name.partition("-")[0]).exists():
            mark.unlink(missing_ok=True)


def _path(folder: Path, pid: int, start_ticks: int | None) -> Path:
    return folder / f"{pid}-{start_ticks}"


def is_stub() -> bool:
    return Path("/proc/self/exe").readlink().name.startswith("triton_python_backend_stub")


def close_inherited_connections() -> None:
    """Close the internet sockets that this process inherited from Triton. Call it before opening any."""
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.stat().st_mode):
                found = socket.socket(fileno=int(path.name))
                if found.family not in _INTERNET:
                    found.detach()
                found.close()
