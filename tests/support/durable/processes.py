"""Processes of a queue under test: its workers, its embedded Redis, and the guard of that."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

PROGRAM = Path(__file__).with_name("worker_program.py")


class WorkerProcess:
    """A worker of a queue. `output` gets its standard output."""

    def __init__(self, command: Sequence[str], output: Path) -> None:
        self._output: IO[bytes] = output.open("ab")
        self.process = subprocess.Popen(command, stdout=self._output)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._output.close()

    def stop(self, limit_s: float) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(limit_s)
        finally:
            self.kill()


def echoing_worker(where: Path, name: str, begun: Path, *, delay_s: float, lease_s: float) -> WorkerProcess:
    """Start a worker whose model echoes, and that writes the requests which it begins to a file."""
    return WorkerProcess([sys.executable, str(PROGRAM), str(where), name, str(delay_s), str(lease_s)], begun)


def redis_of(folder: Path) -> psutil.Process | None:
    """Return the Redis that runs in a folder, found by its working directory."""
    for process in psutil.process_iter(["name", "cwd", "status"]):
        found = process.info
        if (
            found["name"] == "redis-server"
            and found["cwd"] == str(folder)
            and found["status"] != psutil.STATUS_ZOMBIE
        ):
            return process
    return None


def kill_redis(folder: Path, *, guard: bool = False) -> bool:
    """Kill it with SIGKILL, with `guard` after the process that would start it again. Return whether it ran."""
    process = redis_of(folder)
    if process is None:  # between two lives
        return False
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        parent = process.ppid()
        if guard and parent > 1:
            os.kill(parent, signal.SIGKILL)
        process.kill()
    return True
