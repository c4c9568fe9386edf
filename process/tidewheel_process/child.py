from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tidewheel_process.current_process import end_with_parent

_TAIL_BYTES = 8192


class StartError(Exception):
    """Failed start of a child process; the message lacks the child's name."""


class Child(subprocess.Popen[bytes]):
    """Child process in its own session: Ctrl-C reaches only the parent, which ends it."""

    stdin: IO[bytes]  # with a pipe
    stdout: IO[bytes]  # likewise

    def __init__(self, command: Sequence[str], *, ends_with_parent: bool = False, **options: Any) -> None:
        """Start a process with options of `subprocess.Popen`. Raise OSError.

        `ends_with_parent`: the kernel sends SIGTERM when the starting thread ends.
        """
        if ends_with_parent:
            options["preexec_fn"] = end_with_parent
        super().__init__(command, **{"stdin": subprocess.DEVNULL, "start_new_session": True, **options})
        self.started_at = time.monotonic()

    @property
    def has_ended(self) -> bool:
        return self.poll() is not None

    @property
    def exit(self) -> str:
        """Text about the exit: `exit code 3` or `signal 9, Killed`."""
        return describe_exit(self.poll())

    def wait_ready(self, is_ready: Callable[[], bool], limit_s: float) -> None:
        """Wait until `is_ready()`. Raise `StartError` at the child's end or the limit."""
        if not wait_until(lambda: self.has_ended or is_ready(), limit_s):
            raise StartError(f"is not ready after {limit_s:g} s")
        if self.has_ended:
            raise StartError(f"ended at its start with {self.exit}")

    def ends_within(self, limit_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(limit_s)
        return self.has_ended

    def kill(self) -> None:
        super().kill()
        self.wait()

    def end(self, grace_s: float, first: signal.Signals = signal.SIGTERM) -> None:
        self.send_signal(first)
        if not self.ends_within(grace_s):
            self.kill()

    def reap_on_thread(self) -> None:
        threading.Thread(target=self.wait, name=f"reaper-{self.pid}", daemon=True).start()


def describe_exit(code: int | None) -> str:
    if code is None:
        return "no exit code"
    return f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank; empty without one."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode(errors="replace").strip().rpartition("\n")[2].strip()
    return ""


def wait_until(condition: Callable[[], bool], limit_s: float, poll_s: float = 0.02) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(poll_s)
    return True
