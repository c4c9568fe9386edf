from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path

from tidewheel.errors import ConfigError

RUN_DIR = "TIDEWHEEL_RUN_DIR"
MAX_SOCKET_PATH = 107  # bytes: `sun_path` holds 108 with the final zero, see unix(7)
LONGEST_RUN_DIR = 27  # bytes that leave room for the sockets of a cluster, whose names are the longest
_SHORT_TEMPORARY = Path("/tmp")  # noqa: S108 - made with mode 0700, and refused if it belongs to another user
_SHARED_MEMORY = re.compile(r" (/dev/shm/\S+)$", re.MULTILINE)


def run_dir() -> Path:
    """Make and return the folder of all sockets, locks and status files of this user."""
    return private_dir(run_dir_path())


def run_dir_path() -> Path:
    """Return `$TIDEWHEEL_RUN_DIR`, else `tidewheel-UID` in the temporary directory.

    If that path is too long for sockets (over 27 bytes), `/tmp/tidewheel-UID`.
    """
    if named := os.environ.get(RUN_DIR):
        return Path(named).absolute()
    path = Path(tempfile.gettempdir()).absolute() / f"tidewheel-{os.getuid()}"
    return path if len(os.fsencode(path)) <= LONGEST_RUN_DIR else _SHORT_TEMPORARY / path.name


def private_dir(path: Path) -> Path:
    """Make the folder, mode 0700. Raise `ConfigError` if it belongs to another user or is open to others."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from None
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{path} must be a folder that belongs to user {os.getuid()}: set TIDEWHEEL_RUN_DIR")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{path} is open to other users: run chmod 700 on it, or set TIDEWHEEL_RUN_DIR")
    return path


def unwritable(path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or type(error).__name__
    return ConfigError(f"{path} cannot be written ({reason}): make room, or set TIDEWHEEL_RUN_DIR to another folder")


def check_room(folder: Path) -> None:
    """Raise `ConfigError` if no further file can be written into the folder."""
    path = folder / f"room.{os.getpid()}"
    try:
        path.write_bytes(bytes(os.sysconf("SC_PAGESIZE")))
    except OSError as error:
        raise unwritable(folder, error) from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def close_shared_memory() -> None:
    """Give this process's shared memory mode 0600: Triton makes it readable for all, whatever the umask says."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    for path in set(_SHARED_MEMORY.findall(maps)):
        with contextlib.suppress(OSError):  # removed, or of another user
            Path(path).chmod(0o600)
