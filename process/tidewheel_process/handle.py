import contextlib
import os
import select
import signal
from pathlib import Path

from tidewheel_process.child import wait_until


def start_ticks(pid: int, *, or_zombie: bool = False) -> int | None:
    """Return a process's start in ticks since boot (field 22 in proc_pid_stat(5)); None: it has ended."""
    # psutil's `create_time` moves with the system clock, so it cannot be stored.
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")  # any user chose the name
    except (FileNotFoundError, ProcessLookupError):  # any other error says nothing about the process
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" and not or_zombie else int(fields[18])


class ProcessHandle:
    """Handle of a process by pid and start time; `fileno`, a pidfd, is readable after its end."""

    def __init__(self, pid: int, started: int | None = None) -> None:
        """`started`: the start from `start_ticks`; None: the process that has the pid now."""
        self.pid = pid
        self._started = start_ticks(pid) if started is None else started
        self.fileno: int | None = None  # None without pidfds
        self._ending = select.poll()
        with contextlib.suppress(AttributeError, OSError):
            self.fileno = os.pidfd_open(pid)
            self._ending.register(self.fileno, select.POLLIN)
        if not self.is_alive:  # the pidfd may be of a later process with this pid
            self.close()

    @property
    def has_ended(self) -> bool:
        return not self.is_alive if self.fileno is None else bool(self._ending.poll(0))

    @property
    def is_alive(self) -> bool:
        return self._started is not None and start_ticks(self.pid) == self._started

    def wait(self, timeout_s: float) -> bool:
        return wait_until(lambda: not self.is_alive, timeout_s)

    def send_signal(self, number: signal.Signals) -> None:
        if not self.is_alive:
            return
        with contextlib.suppress(ProcessLookupError):
            if self.fileno is not None:
                signal.pidfd_send_signal(self.fileno, number)
            else:
                os.kill(self.pid, number)

    def end(self, first: signal.Signals, grace_s: float) -> None:
        """Send the signal `first`, and SIGKILL if the process lives after `grace_s`."""
        self.send_signal(first)
        if not self.wait(grace_s):
            self.send_signal(signal.SIGKILL)
            self.wait(grace_s)

    def close(self) -> None:
        if self.fileno is not None:
            self._ending.unregister(self.fileno)
            os.close(self.fileno)
            self.fileno = None
