from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from tidewheel.engine.messages import EngineInfo
from tidewheel.engine.process_handle import process_start_ticks
from tidewheel.errors import ConfigError
from tidewheel.private_dir import private_dir, run_dir

LOCK = "lock"  # held by the owning front end
ENGINE_LOCK = "engine.lock"  # held by the engine
SOCKET = "engine.sock"
LOG = "engine.log"
STATUS = "status.json"
DEATHS = "backoff.json"

MAX_SOCKET_PATH = 107  # bytes: `sun_path` holds 108 with the final zero, see unix(7)

State = Literal["starting", "loading", "ready", "failed", "stopped", "crashed"]
_ENDED = ("failed", "stopped", "crashed")
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \S+ [A-Z]+ ")


def engine_dir(repository: Path, model_name: str) -> Path:
    """Make the private folder of a model's engine, with a short unique name."""
    digest = hashlib.sha256(f"{repository.resolve()}\0{model_name}".encode()).hexdigest()[:10]
    label = re.sub(r"[^A-Za-z0-9_.-]", "_", model_name)[:16]
    path = run_dir() / f"{label}-{digest}"
    check_socket_path(path)
    return private_dir(path)


def engine_dirs() -> list[Path]:
    """Return the folders in which an engine was started."""
    return sorted(path.parent for path in run_dir().glob(f"*/{STATUS}"))


def check_socket_path(directory: Path) -> None:
    """Raise `ConfigError` if a socket path in the folder is too long."""
    size = len(os.fsencode(directory / SOCKET))
    if size > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the engine's socket path has {size} bytes and may have {MAX_SOCKET_PATH}: "
            "set TIDEWHEEL_RUN_DIR to a folder with a shorter name"
        )


def socket_address(directory: Path) -> str:
    return f"ipc://{directory / SOCKET}"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`status.json`. `failed` is final: settings or model must change. A killed engine writes no last state."""

    state: State
    pid: int
    start_ticks: int  # tells processes of equal pid apart
    settings: dict[str, object]
    stage: str = ""
    fraction: float = 0.0  # of the stage
    message: str = ""
    is_draining: bool = False  # with its server
    written_ns: int = 0  # monotonic clock
    info: EngineInfo | None = None

    @property
    def is_alive(self) -> bool:
        return self.state not in _ENDED and process_start_ticks(self.pid) == self.start_ticks


_decoder = msgspec.json.Decoder(Status)


def read_status(engine_dir: Path) -> Status | None:
    """Return None if this version cannot read it."""
    try:
        return _decoder.decode((engine_dir / STATUS).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def write_status(engine_dir: Path, status: Status) -> None:
    stamped = msgspec.structs.replace(status, written_ns=time.monotonic_ns())
    replace_file(engine_dir / STATUS, msgspec.json.encode(stamped))


def settings_digest(settings: Mapping[str, object]) -> str:
    return hashlib.sha256(msgspec.json.encode(settings, order="deterministic")).hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def last_log_line(engine_dir: Path, limit: int = 300) -> str:
    """Return the last line without time and level, at most `limit` characters."""
    try:
        with (engine_dir / LOG).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 8192))
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return _LOG_PREFIX.sub("", last)[:limit]
