import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from tidewheel.errors import ConfigError
from tidewheel_process.locked_folder import FolderError, make_private

T = TypeVar("T")

RUN_DIR = "TIDEWHEEL_RUN_DIR"
MAX_SOCKET_PATH = 107  # bytes, see unix(7)
LONGEST_RUN_DIR = 27  # bytes that leave room for the long names of a cluster's sockets
_SHORT_TEMPORARY = Path("/tmp")  # noqa: S108 - made with mode 0700, and refused if it belongs to another user
_SHARED_MEMORY = re.compile(r" (/dev/shm/\S+)$", re.MULTILINE)


def run_dir() -> Path:
    """Make and return this user's folder of sockets, locks and status files."""
    return private_dir(run_dir_path())


def run_dir_path() -> Path:
    """Return `$TIDEWHEEL_RUN_DIR`, else `tidewheel-UID` in the temporary folder, or in /tmp if that path is long."""
    if named := os.environ.get(RUN_DIR):
        return Path(named).absolute()
    path = Path(tempfile.gettempdir()).absolute() / f"tidewheel-{os.getuid()}"
    return path if len(os.fsencode(path)) <= LONGEST_RUN_DIR else _SHORT_TEMPORARY / path.name


def private_dir(path: Path) -> Path:
    """Make a folder of mode 0700. Raise `ConfigError` if it is another user's, or open to others."""
    try:
        return make_private(path, f"set {RUN_DIR}")
    except OSError as error:
        raise unwritable(path, error) from None
    except FolderError as error:
        raise ConfigError(str(error)) from None


def unwritable(path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or type(error).__name__
    return ConfigError(f"{path} cannot be written ({reason}): make room, or set TIDEWHEEL_RUN_DIR to another folder")


def read_value(path: Path, kind: type[T]) -> T | None:
    """Return the value in a JSON file; None if the file cannot be read or holds no value of type `kind`."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    return None


def write_value(path: Path, value: object) -> None:
    """Write a value as JSON, atomically. Raise OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode(value))
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def check_room(folder: Path) -> None:
    """Raise `ConfigError` if no file can be written to the folder."""
    path = folder / f"room.{os.getpid()}"
    try:
        path.write_bytes(bytes(os.sysconf("SC_PAGESIZE")))
    except OSError as error:
        raise unwritable(folder, error) from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def close_shared_memory() -> None:
    """Give this process's shared memory mode 0600: Triton makes it readable to all users."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    for path in set(_SHARED_MEMORY.findall(maps)):
        with contextlib.suppress(OSError):  # removed, or of another user
            Path(path).chmod(0o600)
