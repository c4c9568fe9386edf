import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tidewheel_process.child import wait_until

LOCK = "lock"
LOOK_S = 30.0  # for another process that looks whether a new lock is free
_POLL_S = 0.05
_YOUNG_S = 60.0  # a younger folder without a lock may be in the making


class FolderError(Exception):
    """Folder that other users own or may open; the message says what to change."""


def make_private(path: Path, remedy: str) -> Path:
    """Make a folder of mode 0700. Raise OSError, or `FolderError` for one that another user owns or may open."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own(path):
        raise FolderError(f"{path} must be a folder that belongs to user {os.getuid()}: {remedy}")
    if stat.S_IMODE(path.lstat().st_mode) & 0o077:
        raise FolderError(f"{path} is open to other users: run chmod 700 on it, or {remedy}")
    return path


def is_own(path: Path) -> bool:
    """Return whether the path is this user's folder, and no link. Raise OSError if missing."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def try_lock(path: Path, timeout_s: float = 0.0, *, is_shared: bool = False) -> IO[bytes] | None:
    """Lock a file until `unlock` or the end of this process. None: another process holds the lock.

    Raise OSError, also for a link or another user's file.
    """
    with contextlib.ExitStack() as without_lock:
        file = without_lock.enter_context(open(path, "ab", opener=_open_real))
        if os.fstat(file.fileno()).st_uid != os.getuid():
            raise PermissionError(path)
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        has_lock = wait_until(lambda: flock(file, kind), timeout_s, _POLL_S)
        if not has_lock or not is_at(file.fileno(), path):  # removed or replaced before its lock
            return None
        without_lock.pop_all()
        return file


def unlock(lock: IO[bytes]) -> None:
    """Unlock and close a file. A forked child that still has it open loses the lock too."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    lock.close()


def is_locked(path: Path) -> bool:
    """Return whether a process holds a file's lock. Concurrent checks do not disturb each other."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return not flock(file, fcntl.LOCK_SH)
    return False


def _open_real(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)  # a pipe would wait for its reader


def flock(file: IO[bytes], kind: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    return False


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether `path` is still the open file, and no link to it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


@contextlib.contextmanager
def new_folder(base: Path, prefix: str) -> Iterator[Path]:
    """Make a locked new folder in `base`, removed on leaving. Raise OSError."""
    folder, lock = Path(tempfile.mkdtemp(prefix=prefix, dir=base)), None
    try:
        if (lock := try_lock(folder / LOCK, LOOK_S)) is None:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked by another process", str(folder))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            unlock(lock)


def is_left_over(folder: Path) -> bool:
    """Return whether this user's folder outlived its process."""
    with contextlib.suppress(OSError):
        is_young = time.time() - folder.lstat().st_mtime < _YOUNG_S
        if is_own(folder) and ((folder / LOCK).exists() or not is_young):
            return is_free(folder / LOCK)
    return False


def remove_left_over(base: Path, prefix: str) -> None:
    """Remove the folders in `base` whose processes were killed."""
    for folder in filter(is_left_over, base.glob(f"{prefix}*")):
        shutil.rmtree(folder, ignore_errors=True)


def is_free(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if (lock := try_lock(path)) is not None:
            unlock(lock)
            return True
    return False
