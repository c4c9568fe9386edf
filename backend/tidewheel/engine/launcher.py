from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tidewheel.config import EngineConfig
from tidewheel.engine.backoff import RestartPolicy, record_death
from tidewheel.engine.process_handle import ProcessHandle
from tidewheel.engine.run_dir import LOCK
from tidewheel.engine.spawn import spawn_engine
from tidewheel.engine.status import Status, last_log_line, read_status, write_status
from tidewheel.errors import ConfigError

log = logging.getLogger(__name__)

STOP_GRACE_S = 3.0


class EngineLauncher:
    """Keeper of an engine, for the front end that holds its folder's lock. Use it from one thread."""

    def __init__(
        self, engine_dir: Path, config: EngineConfig, *, command: Sequence[str], policy: RestartPolicy
    ) -> None:
        self._engine_dir = engine_dir
        self._config = config
        self._settings = config.to_settings()
        self._command = command
        self._policy = policy
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None  # last one started here
        self._spawned_at = 0.0

    @property
    def is_owner(self) -> bool:
        return self._lock is not None

    def try_lock(self) -> bool:
        """Return whether this is the owner now. May be retried; the kernel frees a dead owner's lock."""
        if self._lock is None:
            descriptor = os.open(self._engine_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                self._lock = descriptor
        return self.is_owner

    def tend(self, *, was_ready: bool) -> None:
        """Start an engine if there is none and its delay is over. The owner calls this repeatedly.

        `was_ready`: the engine served this front end, so its absence is a death. Raise `ConfigError` if another start
        would not help.
        """
        status = read_status(self._engine_dir)
        if status is not None and status.is_alive:
            if self._may_stay(status, was_ready):
                return
            log.warning("replacing engine %d, which is %s", status.pid, self._why_not(status))
            end_engine(status, STOP_GRACE_S)
            status = None
        if time.monotonic() >= self._earliest_start(status, was_ready):
            self._process = spawn_engine(self._command, self._engine_dir, self._settings)
            self._spawned_at = time.monotonic()
            log.info("started engine %d", self._process.pid)

    def release(self, *, end_engine_that_loads: bool) -> None:
        """Release the lock. The engine stays until no front end is left."""
        status = read_status(self._engine_dir)
        if end_engine_that_loads and self._process is not None and status is not None and status.state != "ready":
            end_engine(status, STOP_GRACE_S)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _may_stay(self, status: Status, was_ready: bool) -> bool:
        if status.settings != self._settings or (status.is_draining and not was_ready):
            return False
        return status.state == "ready" or not self._loads_too_long()

    def _loads_too_long(self) -> bool:
        return self._process is not None and time.monotonic() - self._spawned_at > self._config.engine_start_timeout_s

    def _why_not(self, status: Status) -> str:
        if status.settings != self._settings:
            return "left over from a server with other settings"
        return "shutting down" if status.is_draining else "loading for too long"

    def _earliest_start(self, status: Status | None, was_ready: bool) -> float:
        """Return monotonic seconds. Raise `ConfigError` after a failed load or in a crash loop."""
        is_mine = self._process is not None and status is not None and status.pid == self._process.pid
        if status is not None and status.state == "failed" and (is_mine or was_ready):
            raise ConfigError(status.message)
        if not was_ready and self._process is not None:
            raise ConfigError(f"the engine ended while it loaded ({self._exit()}): {last_log_line(self._engine_dir)}")
        if not was_ready or status is None or status.state == "stopped":
            return 0.0
        deaths = record_death(self._engine_dir, status.pid, status.start_ticks, self._policy.window_s)
        if len(deaths) >= self._policy.max_deaths:
            self._declare_crash_loop(status, len(deaths))
        return deaths[-1].at + self._policy.delay_s(len(deaths))

    def _declare_crash_loop(self, status: Status, num_deaths: int) -> None:
        message = (
            f"the engine died {num_deaths} times within {self._policy.window_s:g} s and is not started again; "
            f"its log ends with: {last_log_line(self._engine_dir)}"
        )
        write_status(
            self._engine_dir,
            Status(
                state="failed",
                pid=status.pid,
                start_ticks=status.start_ticks,
                settings=self._settings,
                message=message,
            ),
        )
        raise ConfigError(message)

    def _exit(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=STOP_GRACE_S)  # ended, but perhaps not yet reaped
        except subprocess.TimeoutExpired:
            return "no exit code"
        return f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"


def end_engine(status: Status, grace_s: float) -> None:
    """End the engine, by force after the grace, and wait for it."""
    handle = ProcessHandle(status.pid, status.start_ticks)
    try:
        handle.end(signal.SIGTERM, grace_s)
    finally:
        handle.close()
