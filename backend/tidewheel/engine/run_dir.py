"""Private folders of engines, with sockets, locks and logs."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from tidewheel.errors import ConfigError
from tidewheel.private_dir import private_dir, run_dir

LOCK = "lock"  # held by the owning front end
ENGINE_LOCK = "engine.lock"  # held by the engine
SOCKET = "engine.sock"
LOG = "engine.log"
STATUS = "status.json"
BACKOFF = "backoff.json"

MAX_SOCKET_PATH = 107  # bytes: `sun_path` holds 108 with the final zero, see unix(7)


def engine_dir(repository: Path, model_name: str) -> Path:
    """Return the folder of a model's engine. Its name is short, stable and unique."""
    digest = hashlib.sha256(f"{repository.resolve()}\0{model_name}".encode()).hexdigest()[:10]
    label = re.sub(r"[^A-Za-z0-9_.-]", "_", model_name)[:16]
    path = run_dir() / f"{label}-{digest}"
    check_socket_path(path)
    return private_dir(path)


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
