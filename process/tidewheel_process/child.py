import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tidewheel_process.current_process import STOP_SIGNALS, end_with_parent

_TAIL_BYTES = 8192
_GUARD_END_S = 5.0


class StartError(Exception):
    """Failed start of a child process; the message lacks the child's name."""


class CrashLoop(Exception):
    """Too many deaths of a process for another start to help."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Delays before restarts, doubled with each death. `max_deaths` within `window_s` seconds are a crash loop."""

    first_delay_s: float = 0.25
    max_delay_s: float = 5.0
    window_s: float = 60.0
    max_deaths: int = 5

    def delay_s(self, num_deaths: int) -> float:
        doublings = min(num_deaths - 1, 30)
        return 0.0 if num_deaths == 0 else min(self.first_delay_s * 2.0**doublings, self.max_delay_s)


class DeathCount:
    """Deaths of a process, timed in seconds for which it ran."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self._policy = policy or RestartPolicy()
        self._deaths: list[float] = []
        self._served_s = 0.0

    def next_delay_s(self, served_s: float, reason: str) -> float:
        """Return the seconds to wait after a death that ended a run of `served_s`. Raise `CrashLoop`."""
        self._served_s += served_s
        self._deaths = [at for at in self._deaths if self._served_s - at <= self._policy.window_s] + [self._served_s]
        if len(self._deaths) >= self._policy.max_deaths:
            raise CrashLoop(
                f"{len(self._deaths)} deaths within {self._policy.window_s:g} s of service, so the server is not "
                f"started again; the last: {reason}"
            )
        return self._policy.delay_s(len(self._deaths))


class RestartedChild:
    """Child process that `watch` restarts after each death."""

    def __init__(
        self, name: str, start: Callable[[], Child], note: Callable[[str], None], policy: RestartPolicy | None = None
    ) -> None:
        self._name = name
        self._start = start
        self._note = note
        self._deaths = DeathCount(policy)
        self._start_at: float | None = None
        self.child = start()

    def watch(self) -> None:
        """Restart a dead child after the delay. Raise `CrashLoop`."""
        now = time.monotonic()
        if self._start_at is not None:
            if now >= self._start_at:
                self._start_at = None
                self.child = self._start()
        elif self.child.has_ended:
            reason = f"{self._name} died (process {self.child.pid}, {self.child.exit})"
            self._start_at = now + self._deaths.next_delay_s(now - self.child.started_at, reason)
            self._note(f"{reason}; starting it again")


class Guard(contextlib.AbstractContextManager["Guard"]):
    """Helper process that cleans up when the `with` block or this process ends, however it ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """`command`: a program that calls `guard`."""
        self._command = command
        self._environment = dict(environment)
        self._reader, self._writer = os.pipe()  # the kernel closes the writer with this process
        self._child = self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def keep(self) -> None:
        """Restart an ended guard."""
        if self._child.has_ended:
            with contextlib.suppress(OSError):
                self._child = self._start()

    def _start(self) -> Child:
        return Child(self._command, stdin=self._reader, env=self._environment)

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)
        os.close(self._writer)
        if not self._child.ends_within(_GUARD_END_S):
            self._child.kill()


def guard(clean_up: Callable[[], object]) -> None:
    """Wait until the guarded process or its `with` block ends, then clean up."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    clean_up()


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
