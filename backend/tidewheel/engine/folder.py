import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from tidewheel.config import EngineConfig
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError
from tidewheel.private_dir import MAX_SOCKET_PATH, private_dir, read_value, run_dir, write_value
from tidewheel_process.child import last_line, start_ticks
from tidewheel_process.locked_folder import LOCK, try_lock, unlock

ENGINE_LOCK = "engine.lock"
SOCKET = "engine.sock"
LOG = "engine.log"
STATUS = "status.json"
CURRENT = "current"  # link to the serving engine's folder
DEATHS = "backoff.json"
LORAS = "loras.json"  # in the folder of a model's engines
HEARTBEAT = "heartbeat"

IDENTITY_CHARS = 10

State = Literal["starting", "loading", "ready", "failed", "stopped", "crashed"]
_ENDED = ("failed", "stopped", "crashed")
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \S+ [A-Z]+ ")


def engine_dir(repository: Path, model_name: str) -> Path:
    """Make and return the private folder of a model's engines."""
    digest = hashlib.sha256(f"{repository.resolve()}\0{model_name}".encode()).hexdigest()[:8]
    path = run_dir() / f"{model_label(model_name)}-{digest}"
    size = len(os.fsencode(path / ("x" * IDENTITY_CHARS) / SOCKET))
    if size > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the engine's socket path has {size} bytes and may have {MAX_SOCKET_PATH}: "
            "set TIDEWHEEL_RUN_DIR to a folder with a shorter name"
        )
    return private_dir(path)


def model_label(model_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", model_name)[:16]


def label_of(engine_link: Path) -> str:
    return engine_link.parent.name.rpartition("-")[0]


def engine_dirs() -> list[Path]:
    folders = (path.parent for path in run_dir().glob(f"*/*/{STATUS}"))
    return sorted(folder for folder in folders if not folder.is_symlink())


def current_engines() -> list[Path]:
    """Return links to the serving engine's folder of each model."""
    return sorted(run_dir().glob(f"*/{CURRENT}"))


def devices_of_ranks() -> dict[str, list[str]]:
    """Return the device of each rank by model, of engines that serve with several ranks."""
    serving = ((label_of(link), read_serving(link)) for link in current_engines())
    return {label: [device for _, device in status.ranks] for label, status in serving if status and status.ranks}


class EngineTarget(NamedTuple):
    folder: Path
    identity: str
    started: EngineConfig  # settings at the start
    config: EngineConfig  # that the running engine takes
    read_ns: int  # time of `config`, monotonic clock


def socket_address(directory: Path) -> str:
    return f"ipc://{directory / SOCKET}"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine, in a file that outlives a killed engine."""

    state: State
    pid: int
    start_ticks: int  # tells processes of equal pid apart
    settings: dict[str, object]
    started: dict[str, object] = {}
    identity: str = ""  # of what only another engine can change
    read_ns: int = 0  # of the settings, monotonic clock
    stage: str = ""
    fraction: float = 0.0  # of the stage
    message: str = ""
    is_draining: bool = False
    is_given_up: bool = False  # no later start can do better
    written_ns: int = 0  # monotonic clock
    info: EngineInfo | None = None
    ranks: list[tuple[int, str]] = []  # process id and device of each, of an engine of several processes

    @property
    def is_alive(self) -> bool:
        return self.state not in _ENDED and start_ticks(self.pid) == self.start_ticks

    @property
    def is_serving(self) -> bool:
        return self.state == "ready" and self.is_alive


def first_status(pid: int, state: State, settings: dict[str, object], identity: str) -> Status:
    ticks = start_ticks(pid) or 0  # no process started at 0
    return Status(state=state, pid=pid, start_ticks=ticks, settings=settings, started=settings, identity=identity)


def read_status(engine_dir: Path) -> Status | None:
    """Return an engine's status; None if absent, or of another version."""
    return read_value(engine_dir / STATUS, Status)


def read_serving(engine_dir: Path) -> Status | None:
    """Return the status of a ready engine; None without one."""
    status = read_status(engine_dir)
    return status if status is not None and status.is_serving else None


def write_status(engine_dir: Path, status: Status) -> None:
    write_value(engine_dir / STATUS, msgspec.structs.replace(status, written_ns=time.monotonic_ns()))


def settings_digest(settings: Mapping[str, object]) -> str:
    return hashlib.sha256(msgspec.json.encode(settings, order="deterministic")).hexdigest()[:IDENTITY_CHARS]


def last_log_line(engine_dir: Path, limit: int = 300) -> str:
    """Return the log's last line without time and level, cut to `limit` characters."""
    return _LOG_PREFIX.sub("", last_line(engine_dir / LOG))[:limit]


def find_engine(model_dir: Path) -> EngineTarget | None:
    status = read_serving(model_dir / CURRENT)
    if status is None or status.is_draining:
        return None
    started, config = (EngineConfig.from_settings(settings) for settings in (status.started, status.settings))
    return EngineTarget(model_dir / status.identity, status.identity, started, config, status.read_ns)


def may_start(target: EngineTarget) -> bool:
    """Return whether the engine has ended and may start again."""
    status = read_status(target.folder)
    return status is not None and not (status.is_alive or status.is_draining or status.is_given_up)


def take_back(model_dir: Path) -> None:
    """Let an engine that ended to make room start again."""
    status = read_status(model_dir / CURRENT)
    if status is not None and status.is_draining and not status.is_alive:
        write_status(model_dir / CURRENT, msgspec.structs.replace(status, is_draining=False))


def _remove_ended(target: EngineTarget) -> None:
    for path in target.folder.parent.iterdir():
        if path.is_symlink() or not path.is_dir() or path == target.folder:
            continue
        status = read_status(path)
        if (status is None or not status.is_alive) and (lock := try_lock(path / LOCK)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            unlock(lock)


def make_current(target: EngineTarget) -> None:
    """Make all front ends of the model switch to this engine."""
    model_dir = target.folder.parent
    temporary = model_dir / f"{CURRENT}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.folder.name)
    temporary.replace(model_dir / CURRENT)
    _remove_ended(target)
