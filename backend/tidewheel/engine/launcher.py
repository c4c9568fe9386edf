from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import tidewheel
from tidewheel.engine.folder import (
    DEATHS,
    LOCK,
    LOG,
    Place,
    Status,
    first_status,
    last_log_line,
    read_status,
    replace_file,
    write_status,
)
from tidewheel.engine.process_handle import ProcessHandle
from tidewheel.errors import ConfigError, Draining, PermanentError
from tidewheel.private_dir import check_room, private_dir, unwritable

log = logging.getLogger(__name__)

STOP_GRACE_S = 3.0
ROOM_CHECK_S = 1.0
LATE = "loading for too long"
MAX_LOG_BYTES = 16 << 20  # until it is set aside at a start
FAULTS = "TIDEWHEEL_FAULTS"  # module to run in place of the engine's, which fails on purpose
FAULTS_ALLOWED = "TIDEWHEEL_FAULTS_ALLOWED"  # set by `tidewheel serve --allow-faults`


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Delays of restarts, doubled per death or failed start. `max_deaths` within `window_s` are a crash loop."""

    first_delay_s: float = 0.25
    max_delay_s: float = 5.0
    window_s: float = 60.0
    max_deaths: int = 5

    def delay_s(self, num_deaths: int) -> float:
        doublings = min(num_deaths - 1, 30)
        return 0.0 if num_deaths == 0 else min(self.first_delay_s * 2.0**doublings, self.max_delay_s)


class Death(msgspec.Struct, frozen=True):
    pid: int
    start_ticks: int
    at: float  # monotonic seconds


_deaths_decoder = msgspec.json.Decoder(list[Death])


class EngineLauncher:
    """Engine of a folder, started by the front end that holds the folder's lock. Not thread safe."""

    def __init__(self, place: Place, *, command: Sequence[str], policy: RestartPolicy) -> None:
        self._engine_dir = place.folder
        self._start_timeout_s = place.config.engine_start_timeout_s
        self._identity = place.identity
        self._settings = place.started.to_settings()
        self._command = command
        self._policy = policy
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None  # last one started here
        self._loads_since = 0.0  # monotonic seconds, or when this became the owner
        self._num_failed_starts = 0  # since an engine was ready
        self._next_start = 0.0  # monotonic seconds
        self._next_room_check = 0.0  # likewise

    @property
    def is_owner(self) -> bool:
        return self._lock is not None

    def try_lock(self) -> bool:
        """Return whether this is the owner now. The kernel frees a dead owner's lock."""
        if self._lock is not None and not _is_file(
            self._lock, self._engine_dir / LOCK
        ):  # another may lock a new file
            self._unlock()
        if self._lock is None:
            private_dir(self._engine_dir)
            self._lock = take_lock(self._engine_dir / LOCK)
            self._loads_since = time.monotonic()
        return self.is_owner

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def put_off(self) -> None:
        """Start or join no engine for a while, longer each time."""
        self._num_failed_starts += 1
        self._next_start = time.monotonic() + self._policy.delay_s(self._num_failed_starts)

    def seek(self, *, was_ready: bool, since_ns: int) -> Status | None:
        """Return the status of a ready engine. Call repeatedly from `since_ns` on, so that the owner starts one.

        `was_ready`: an engine served this front end, so its absence is a death. Raise `ConfigError` if a start
        failed, `PermanentError` if another would not help, and `Draining` if the server shuts down.
        """
        status = read_status(self._engine_dir)
        if was_ready and status is not None and status.is_draining and not status.is_alive:
            raise Draining("the server is shutting down")
        if time.monotonic() < self._next_start:
            return None
        try:
            if self.try_lock():
                self._tend(status, was_ready)
            elif status is not None:
                self._check_owner(status, was_ready, since_ns)
        except OSError as error:
            raise unwritable(self._engine_dir, error) from None
        status = read_status(self._engine_dir)
        if status is None or status.state != "ready" or not status.is_alive or status.identity != self._identity:
            self._check_room(status)
            return None
        self._num_failed_starts = 0
        return status

    def _check_room(self, status: Status | None) -> None:
        """Raise `ConfigError` where no engine could say that it is ready, nor its owner why it does not start."""
        if status is not None and time.monotonic() >= self._next_room_check:
            self._next_room_check = time.monotonic() + ROOM_CHECK_S
            check_room(self._engine_dir)

    def give_up(self, message: str) -> None:
        """Tell others that the owner does not start the engine again."""
        status = read_status(self._engine_dir)
        if self.is_owner and status is not None:
            final = msgspec.structs.replace(status, state="failed", message=message, is_given_up=True)
            with contextlib.suppress(OSError):
                write_status(self._engine_dir, final)

    def release(self, *, end_engine_that_loads: bool) -> None:
        """Release the lock. The engine lives as long as a front end."""
        status = read_status(self._engine_dir)
        if end_engine_that_loads and self._is_mine(status) and status is not None and status.state != "ready":
            _end(status, STOP_GRACE_S)
        self._unlock()

    def _is_mine(self, status: Status | None) -> bool:
        return self._process is not None and status is not None and status.pid == self._process.pid

    def _tend(self, status: Status | None, was_ready: bool) -> None:
        if status is not None and status.is_alive:
            if (why_not := self._why_not(status, was_ready)) is None:
                return
            log.warning("replacing engine %d, which is %s", status.pid, why_not)
            _end(status, STOP_GRACE_S)
            if why_not == LATE:
                self._process = None
                limit = f"{self._start_timeout_s:g} s: raise engine_start_timeout_s"
                raise ConfigError(f"the engine was not ready within {limit}")
            status = None
        self._check_last_start(status, was_ready)
        if time.monotonic() >= self._earliest_start(status, was_ready):
            self._start(was_ready)

    def _start(self, was_ready: bool) -> None:
        if not was_ready:
            (self._engine_dir / DEATHS).unlink(missing_ok=True)  # a load is a new beginning
        self._process = spawn_engine(self._command, self._engine_dir, self._settings, self._identity)
        self._loads_since = time.monotonic()
        log.info("started engine %d", self._process.pid)

    def _check_owner(self, status: Status, was_ready: bool, since_ns: int) -> None:
        """Raise `ConfigError` if another owner's engine failed, unless that owner tries again."""
        if status.state == "failed" and status.written_ns >= since_ns and (status.is_given_up or not was_ready):
            raise _failure(status)

    def _why_not(self, status: Status, was_ready: bool) -> str | None:
        """Return why a living engine cannot be used, if so."""
        if status.identity != self._identity:
            return "left over from a server with other settings"
        if status.is_draining and not was_ready:
            return "shutting down"
        is_late = status.state != "ready" and time.monotonic() - self._loads_since > self._start_timeout_s
        return LATE if is_late else None

    def _check_last_start(self, status: Status | None, was_ready: bool) -> None:
        """Raise `ConfigError` if the last start failed, once unless that is permanent."""
        is_mine, process = self._is_mine(status), self._process
        if status is not None and status.state == "failed" and (is_mine or (was_ready and status.is_given_up)):
            self._process = None
            raise _failure(status)
        has_served = was_ready and (status is None or status.state == "stopped" or status.info is not None)
        if process is not None and not has_served and (is_mine or not was_ready):
            self._process = None
            last_words = last_log_line(self._engine_dir)
            raise ConfigError(f"the engine ended while it loaded ({_exit(process)}): {last_words}")

    def _earliest_start(self, status: Status | None, was_ready: bool) -> float:
        """Return monotonic seconds. Raise `PermanentError` in a crash loop."""
        if not was_ready or status is None or status.state == "stopped" or status.info is None:
            return 0.0
        deaths = record_death(self._engine_dir, status.pid, status.start_ticks, self._policy.window_s)
        if len(deaths) >= self._policy.max_deaths:
            raise PermanentError(
                f"the engine died {len(deaths)} times within {self._policy.window_s:g} s and is not started again; "
                f"its log ends with: {last_log_line(self._engine_dir)}"
            )
        return deaths[-1].at + self._policy.delay_s(len(deaths))


def take_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_file(descriptor, path):
            return descriptor
    except BlockingIOError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _failure(status: Status) -> ConfigError:
    return PermanentError(status.message) if status.is_given_up else ConfigError(status.message)


def _exit(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=STOP_GRACE_S)  # ended, but perhaps not yet reaped
    except subprocess.TimeoutExpired:
        return "no exit code"
    return f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"


def stop_engine(engine_dir: Path, timeout_s: float = 5.0) -> bool:
    """Return whether an engine ran. Kill it after `timeout_s`, in which it answers its requests."""
    status = read_status(engine_dir)
    if status is None or not status.is_alive:
        return False
    _end(status, timeout_s)
    return True


def _end(status: Status, grace_s: float) -> None:
    handle = ProcessHandle(status.pid, status.start_ticks)
    try:
        handle.end(signal.SIGTERM, grace_s)
    finally:
        handle.close()


def recent_deaths(engine_dir: Path, window_s: float) -> list[Death]:
    """Return deaths, oldest first. Ignore future times, which are from before the last boot."""
    try:
        deaths = _deaths_decoder.decode((engine_dir / DEATHS).read_bytes())
    except (OSError, msgspec.DecodeError):
        return []
    now = time.monotonic()
    return [death for death in deaths if now - window_s <= death.at <= now]


def record_death(engine_dir: Path, pid: int, start_ticks: int, window_s: float) -> list[Death]:
    """Add a death, unless it is known, and return the recent ones."""
    deaths = recent_deaths(engine_dir, window_s)
    if not any((death.pid, death.start_ticks) == (pid, start_ticks) for death in deaths):
        deaths.append(Death(pid, start_ticks, time.monotonic()))
        replace_file(engine_dir / DEATHS, msgspec.json.encode(deaths))
    return deaths


def engine_command() -> list[str]:
    return [python_executable(), "-P", "-m", _engine_module()]


def _engine_module() -> str:
    """Return the module of the engine, or that of a test's. Raise `ConfigError` unless the latter is allowed."""
    faults = os.environ.get(FAULTS)
    if faults is None:
        return "tidewheel.engine.process"
    if os.environ.get(FAULTS_ALLOWED) != "1":
        raise ConfigError(
            f"{FAULTS} is {faults!r}, which makes the engine fail on purpose: unset it (it is for tests)"
        )
    log.warning("%s is %s: this engine fails on purpose", FAULTS, faults)
    return faults


def python_executable() -> str:
    """Return the running interpreter, or one like it if a host program embeds it. Raise `ConfigError`."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = (
        os.environ.get("TIDEWHEEL_PYTHON"),
        sys.executable if Path(sys.executable or "").name.startswith("python") else None,
        str(Path(sys.prefix) / "bin" / version),
        shutil.which(version),
    )
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise ConfigError(f"no {version} found to run the engine with: set TIDEWHEEL_PYTHON to one")


def python_environment() -> dict[str, str]:
    """Return the environment in which `python_executable` imports what this process imports."""
    package = Path(tidewheel.__file__).parent
    paths = [str(package.parent), *(p for p in sys.path if p and Path(p).is_dir() and Path(p) != package)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def spawn_engine(
    command: Sequence[str], engine_dir: Path, settings: dict[str, object], identity: str
) -> subprocess.Popen[bytes]:
    """Start an engine that outlives its front end, and write its first status."""
    text = msgspec.json.encode(settings).decode()
    arguments = [*command, "--engine-dir", str(engine_dir), "--settings", text, "--identity", identity]
    log_path = engine_dir / LOG
    if log_path.exists() and log_path.stat().st_size > MAX_LOG_BYTES:
        log_path.replace(log_path.with_suffix(".log.1"))
    with log_path.open("ab") as output:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=python_environment(),
            )
        except OSError as error:
            raise ConfigError(f"the engine process cannot be started: {error}") from None
    threading.Thread(target=process.wait, name="engine-reaper", daemon=True).start()
    try:
        write_status(engine_dir, first_status(process.pid, "starting", settings, identity))
    except OSError:
        process.kill()
        raise
    return process
