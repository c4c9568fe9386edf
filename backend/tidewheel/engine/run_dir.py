"""Where engines keep their sockets, locks and logs: one folder per engine, readable by its user alone."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from tidewheel.errors import ConfigError
from tidewheel.private_dir import private_dir, run_dir

LOCK = "lock"  # held by the front end that owns the engine
ENGINE_LOCK = "engine.lock"  # held by the engine itself: one per folder
SOCKET = "engine.sock"
LOG = "engine.log"
STATUS = "status.json"
BACKOFF = "backoff.json"

MAX_SOCKET_PATH = 107  # bytes: `sun_path` holds 108 with the terminating zero, see unix(7)


def engine_dir(repository: Path, model_name: str) -> Path:
    """The folder of the engine that serves this model of this repository: short, stable, unique."""
    digest = hashlib.sha256(f"{repository.resolve()}\0{model_name}".encode()).hexdigest()[:10]
    label = re.sub(r"[^A-Za-z0-9_.-]", "_", model_name)[:16]
    path = run_dir() / f"{label}-{digest}"
    check_socket_path(path)
    return private_dir(path)


def check_socket_path(directory: Path) -> None:
    """Raises `ConfigError` if a unix socket in the folder would have too long a name."""
    size = len(os.fsencode(directory / SOCKET))
    if size > MAX_SOCKET_PATH:
        raise ConfigError(
            f"the engine's socket path has {size} bytes and may have {MAX_SOCKET_PATH}: "
            "set TIDEWHEEL_RUN_DIR to a folder with a shorter name"
        )


def socket_address(directory: Path) -> str:
    """The ZeroMQ address of the engine in this folder."""
    return f"ipc://{directory / SOCKET}"
