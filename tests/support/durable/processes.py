"""Processes of a queue under test: its workers, its embedded Redis, and the guard of that."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil

PROGRAM = Path(__file__).with_name("worker_program.py")


class WorkerProcess:
    """A worker that echoes, and a file of the requests that it began."""

    def __init__(self, where: Path, name: str, log: Path, *, delay_s: float, lease_s: float) -> None:
        self._log: IO[bytes] = log.open("ab")
        arguments = [str(where), name, str(delay_s), str(lease_s)]
        self.process = subprocess.Popen([sys.executable, str(PROGRAM), *arguments], stdout=self._log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()

    def stop(self, limit_s: float) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(limit_s)
        finally:
            self.kill()


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


def kill_redis(folder: Path, *, guard: bool = False) -> None:
    """Kill it with SIGKILL, with `guard` after the process that would start it again."""
    process = redis_of(folder)
    if process is None:  # between two lives
        return
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        parent = process.ppid()
        if guard and parent > 1:
            os.kill(parent, signal.SIGKILL)
        process.kill()
