import contextlib
import glob
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from tidewheel.config import EngineConfig, describe_changes
from tidewheel.engine import folder
from tidewheel.engine.connection import ANSWER_S, drain_all
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError, Draining, PermanentError
from tidewheel.private_dir import check_room, private_dir, read_value, unwritable, write_value
from tidewheel.runner.host_memory import available_host_bytes
from tidewheel.settings import MIB
from tidewheel_process.child import Child, ProcessHandle, RestartPolicy, wait_until
from tidewheel_process.locked_folder import LOCK, is_at, try_lock, unlock

log = logging.getLogger(__name__)

STOP_GRACE_S = 3.0
DRAIN_S = 30.0  # for requests of an engine that makes room
FINAL_ANSWERS_S = 3.0
_POLL_S = 0.1
ROOM_CHECK_S = 1.0
LATE = "loading for too long"
MAX_LOG_BYTES = 16 << 20  # until set aside at a start
# Turns of the loop in which a thread of GNU OpenMP awaits the next product before it sleeps: 0.1 to 0.3 ms. The
# default, 300,000, keeps a core from the processes that hand on the tokens.
SPINS = "5000"
FAULTS = "TIDEWHEEL_FAULTS"  # module run in place of the engine, to fail on purpose
FAULTS_ALLOWED = "TIDEWHEEL_FAULTS_ALLOWED"  # set by `tidewheel serve --allow-faults`


def choose_engine(model_dir: Path, config: EngineConfig) -> folder.EngineTarget:
    """Return the engine to start or join, for `make_current`. Stop the present one if memory does not hold both."""
    status = folder.read_status(model_dir / folder.CURRENT)
    identity = _identity(config)
    wanted = folder.EngineTarget(model_dir / identity, identity, config, config, time.monotonic_ns())
    is_first = status is None or not status.is_alive or status.is_draining
    if status is not None and not is_first:
        try:
            started = EngineConfig.from_settings(status.started)
        except ConfigError as error:
            log.info("another engine is needed: the present one is of another version (%s)", error)
        else:
            if started.can_become(config) and _identity(started) == status.identity:
                return wanted._replace(folder=model_dir / status.identity, identity=status.identity, started=started)
            log.info(
                "another engine is needed: %s", describe_changes(started, config) or "files of the model changed"
            )
        if not _fits_beside(status, config):
            log.warning("memory is short: engine %d ends before the next one starts", status.pid)
            present = model_dir / status.identity
            wait_until(lambda: not drain_all([present], ANSWER_S), DRAIN_S, _POLL_S)
            stop_engine(present, FINAL_ANSWERS_S)
    private_dir(wanted.folder)
    if is_first:
        folder.make_current(wanted)
    return wanted


def _identity(config: EngineConfig) -> str:
    files = [_describe_files(Path(name)) for name in (config.model, config.tokenizer, config.draft_model) if name]
    return folder.settings_digest({"settings": config.fixed_settings(), "files": files})


def _describe_files(model: Path) -> list[tuple[str, int, int]]:
    try:
        paths = model.parent.glob(f"{glob.escape(model.name)}*") if model.is_file() else model.iterdir()
        stats = [(path.name, path.stat()) for path in sorted(paths)]
    except OSError:
        return []
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _fits_beside(status: folder.Status, config: EngineConfig) -> bool:
    info = status.info
    if info is None:
        return False
    fixed = info.weights_bytes + info.activation_bytes + info.graph_bytes
    free = info.device_bytes - fixed - info.kv_cache_bytes if info.device_bytes else available_host_bytes()
    return fixed + _cache_bytes(info, config) <= free


def _cache_bytes(info: EngineInfo, config: EngineConfig) -> int:
    if config.num_blocks is not None:
        block_size = config.block_size or info.block_size
        return config.num_blocks * block_size * info.kv_cache_bytes // max(info.num_cache_tokens, 1)
    if config.kv_cache_memory_mb is not None:
        return config.kv_cache_memory_mb * MIB
    share = config.device_memory_share or config.gpu_memory_utilization
    return int(share * info.device_bytes)  # a CPU's cache takes what is left


class EngineLauncher:
    """Starter of a folder's engine; the holder of the folder's lock owns the engine. Not thread-safe."""

    def __init__(self, target: folder.EngineTarget, *, command: Sequence[str], policy: RestartPolicy) -> None:
        self.was_ready = False  # an engine served this front end, so absence is a death
        self._target = target
        self._engine_dir = target.folder
        self._command = command
        self._policy = policy
        self._lock: IO[bytes] | None = None
        self._child: Child | None = None
        self._loads_since = 0.0  # monotonic seconds, or when this became the owner
        self._num_failed_starts = 0
        self._next_start = 0.0  # monotonic seconds
        self._next_room_check = 0.0  # likewise

    @property
    def is_owner(self) -> bool:
        return self._lock is not None

    def try_lock(self) -> bool:
        path = self._engine_dir / LOCK
        if self._lock is not None and not is_at(self._lock.fileno(), path):
            self._unlock()
        if self._lock is None:
            private_dir(self._engine_dir)
            self._lock = try_lock(path)
            self._loads_since = time.monotonic()
        return self.is_owner

    def put_off(self) -> None:
        """Delay the next start or join, longer each time."""
        self._num_failed_starts += 1
        self._next_start = time.monotonic() + self._policy.delay_s(self._num_failed_starts)

    def seek(self, since_ns: int) -> folder.Status | None:
        """Return the ready engine's status, or start it if needed and return None. Call repeatedly.

        `since_ns`: monotonic time of the first call. Raise `ConfigError` for a failed start, `PermanentError` if no
        other start can help, `Draining` at shutdown.
        """
        status = folder.read_status(self._engine_dir)
        if self.was_ready and status is not None and status.is_draining and not status.is_alive:
            raise Draining("the server is shutting down")
        if time.monotonic() < self._next_start:
            return None
        try:
            if self.try_lock():
                self._tend(status)
            elif status is not None and status.written_ns >= since_ns:
                self._check_failed(status, is_mine=not self.was_ready)
        except OSError as error:
            raise unwritable(self._engine_dir, error) from None
        status = folder.read_status(self._engine_dir)
        if status is not None and status.is_serving and status.identity == self._target.identity:
            self._num_failed_starts = 0
            return status
        if status is not None and time.monotonic() >= self._next_room_check:
            self._next_room_check = time.monotonic() + ROOM_CHECK_S
            check_room(self._engine_dir)
        return None

    def give_up(self, message: str) -> None:
        """Tell other front ends that the owner does not restart the engine."""
        status = folder.read_status(self._engine_dir)
        if self.is_owner and status is not None:
            final = msgspec.structs.replace(status, state="failed", message=message, is_given_up=True)
            with contextlib.suppress(OSError):
                folder.write_status(self._engine_dir, final)

    def release(self) -> None:
        """Give up ownership; stop the front end's own engine if it still loads."""
        status = folder.read_status(self._engine_dir)
        if status is not None and self._is_mine(status) and status.state != "ready" and not self.was_ready:
            _end(status, STOP_GRACE_S)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def _is_mine(self, status: folder.Status) -> bool:
        return self._child is not None and status.pid == self._child.pid

    def _tend(self, status: folder.Status | None) -> None:
        if status is not None and status.is_alive:
            if not (fault := self._fault(status)):
                return
            log.warning("replacing engine %d, which is %s", status.pid, fault)
            _end(status, STOP_GRACE_S)
            if fault == LATE:
                self._child = None
                limit = f"{self._target.config.engine_start_timeout_s:g} s: raise engine_start_timeout_s"
                raise ConfigError(f"the engine was not ready within {limit}")
            status = None
        self._check_last_start(status)
        if not self.was_ready:
            (self._engine_dir / folder.DEATHS).unlink(missing_ok=True)  # a load is a new beginning
        elif time.monotonic() < self._earliest_restart(status):
            return
        self._child = spawn_engine(self._command, self._target)
        self._loads_since = time.monotonic()
        log.info("started engine %d", self._child.pid)

    def _fault(self, status: folder.Status) -> str:
        if status.identity != self._target.identity:
            return "left over from a server with other settings"
        if status.is_draining and not self.was_ready:
            return "shutting down"
        has_time = time.monotonic() - self._loads_since <= self._target.config.engine_start_timeout_s
        return "" if status.state == "ready" or has_time else LATE

    def _check_failed(self, status: folder.Status, *, is_mine: bool) -> None:
        if status.state == "failed" and (is_mine or (self.was_ready and status.is_given_up)):
            self._child = None
            raise PermanentError(status.message) if status.is_given_up else ConfigError(status.message)

    def _check_last_start(self, status: folder.Status | None) -> None:
        child, is_loading = self._child, False
        if status is not None:
            self._check_failed(status, is_mine=self._is_mine(status))
            is_loading = self._is_mine(status) and status.state != "stopped" and status.info is None
        if child is not None and (is_loading or not self.was_ready):
            self._child = None
            child.ends_within(STOP_GRACE_S)  # ended, but perhaps not yet reaped
            last_words = folder.last_log_line(self._engine_dir)
            raise ConfigError(f"the engine ended while it loaded ({child.exit}): {last_words}")

    def _earliest_restart(self, status: folder.Status | None) -> float:
        """Return the next start (monotonic s). Raise `PermanentError` in a crash loop."""
        if status is None or status.state == "stopped" or status.info is None:
            return 0.0
        deaths = record_death(self._engine_dir, status, self._policy.window_s)
        if len(deaths) >= self._policy.max_deaths:
            raise PermanentError(
                f"the engine died {len(deaths)} times within {self._policy.window_s:g} s and is not started again; "
                f"its log ends with: {folder.last_log_line(self._engine_dir)}"
            )
        return max(deaths.values()) + self._policy.delay_s(len(deaths))


def stop_engine(engine_dir: Path, timeout_s: float = 5.0) -> None:
    """Stop a folder's engine, if one runs. Requests have `timeout_s` to end."""
    status = folder.read_status(engine_dir)
    if status is not None and status.is_alive:
        _end(status, timeout_s)


def _end(status: folder.Status, grace_s: float) -> None:
    with contextlib.closing(ProcessHandle(status.pid, status.start_ticks)) as handle:
        handle.end(signal.SIGTERM, grace_s)


def record_death(engine_dir: Path, status: folder.Status, window_s: float) -> dict[str, float]:
    """Record the engine's death; return the times (monotonic s) of all within `window_s`, since the last boot."""
    path, process, now = engine_dir / folder.DEATHS, f"{status.pid} {status.start_ticks}", time.monotonic()
    recorded = read_value(path, dict[str, float]) or {}
    known = {name: at for name, at in recorded.items() if now - window_s <= at <= now}
    deaths = {process: now} | known
    if process not in known:
        write_value(path, deaths)
    return deaths


def engine_command() -> list[str]:
    """Return the command that starts an engine, replaceable by tests. Raise `ConfigError`."""
    module, faults = "tidewheel.engine.process", os.environ.get(FAULTS)
    if faults is not None:
        if os.environ.get(FAULTS_ALLOWED) != "1":
            raise ConfigError(
                f"{FAULTS} is {faults!r}, which makes the engine fail on purpose: unset it (it is for tests)"
            )
        log.warning("%s is %s: this engine fails on purpose", FAULTS, faults)
        module = faults
    return [python_executable(), "-P", "-m", module]


def python_executable() -> str:
    """Return this Python's interpreter, also when embedded in Triton. Raise `ConfigError`."""
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
    """Return an environment with which `python_executable` imports what this process imports."""
    package = Path(__file__).parents[1]
    paths = [str(package.parent), *(p for p in sys.path if p and Path(p).is_dir() and Path(p) != package)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def spawn_engine(command: Sequence[str], target: folder.EngineTarget) -> Child:
    settings = target.started.to_settings()
    arguments = [*command, "--engine-dir", str(target.folder)]
    arguments += ["--settings", msgspec.json.encode(settings).decode(), "--identity", target.identity]
    log_path = target.folder / folder.LOG
    if log_path.exists() and log_path.stat().st_size > MAX_LOG_BYTES:
        log_path.replace(log_path.with_suffix(".log.1"))
    with log_path.open("ab") as output:
        try:
            variables = python_environment()
            if "OMP_WAIT_POLICY" not in variables:
                variables.setdefault("GOMP_SPINCOUNT", SPINS)
            child = Child(arguments, stdout=output, stderr=output, env=variables)
        except OSError as error:
            raise ConfigError(f"the engine process cannot be started: {error}") from None
    child.reap_on_thread()
    try:
        folder.write_status(target.folder, folder.first_status(child.pid, "starting", settings, target.identity))
    except OSError:
        child.kill()
        raise
    return child
