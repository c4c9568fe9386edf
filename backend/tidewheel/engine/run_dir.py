"""Where engines keep their sockets, locks and logs: one folder per engine, readable by its user alone."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from pathlib import Path

from tidewheel.errors import ConfigError

LOCK = "lock"  # held by the front end that owns the engine
ENGINE_LOCK = "engine.lock"  # held by the engine itself: one per folder
SOCKET = "engine.sock"
LOG = "engine.log"
STATUS = "status.json"
BACKOFF = "backoff.json"

MAX_SOCKET_PATH = 107  # bytes: `sun_path` holds 108 with the terminating zero, see unix(7)


def run_dir() -> Path:
    """`$TIDEWHEEL_RUN_DIR`, or a folder of this user in the temporary directory. Made with mode 0700.

    Raises `ConfigError` when the folder belongs to somebody else or others may look into it.
    """
    named = os.environ.get("TIDEWHEEL_RUN_DIR")
    path = Path(named) if named else Path(tempfile.gettempdir()) / f"tidewheel-{os.getuid()}"
    return _private_dir(path.absolute())


def engine_dir(repository: Path, model_name: str) -> Path:
    """The folder of the engine that serves this model of this repository: short, stable, unique."""
    digest = hashlib.sha256(f"{repository.resolve()}\0{model_name}".encode()).hexdigest()[:10]
    label = re.sub(r"[^A-Za-z0-9_.-]", "_", model_name)[:16]
    path = run_dir() / f"{label}-{digest}"
    check_socket_path(path)
    return _private_dir(path)


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


def _private_dir(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{path} must be a folder that belongs to user {os.getuid()}: set TIDEWHEEL_RUN_DIR")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{path} is open to other users: run chmod 700 on it, or set TIDEWHEEL_RUN_DIR")
    return path
