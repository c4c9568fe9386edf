"""Private folders that one process holds, and left-over folders of killed processes."""

from __future__ import annotations

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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock

LOCK = "lock"
LOOK_S = 30.0  # for another process that looks whether a new lock is free
_YOUNG_S = 60.0  # a younger folder without a lock may be in the making


class FolderError(Exception):
    """Folder not this user's alone; the message says what to change."""


def make_private(path: Path, remedy: str) -> Path:
    """Make the folder, mode 0700. Raise `FolderError` if it is another user's or open to others, or OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own(path):
        raise FolderError(f"{path} must be a folder that belongs to user {os.getuid()}: {remedy}")
    if stat.S_IMODE(path.lstat().st_mode) & 0o077:
        raise FolderError(f"{path} is open to other users: run chmod 700 on it, or {remedy}")
    return path


def is_own(path: Path) -> bool:
    """Return whether the path is this user's real folder. Raise OSError if missing."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def try_lock(path: Path, timeout_s: float = 0.0) -> FileLock | None:
    """Lock a file until `release` or the end of this process. None: another process holds the lock.

    Raise OSError, also for a link or another user's file.
    """
    from filelock import FileLock, Timeout  # takes 40 ms, which only a holder pays

    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_uid != os.getuid():
            raise PermissionError(path)
    lock = FileLock(path, timeout=timeout_s, mode=0o600, thread_local=False)
    try:
        lock.acquire(poll_interval=0.05)
    except Timeout:
        return None
    if not is_locked(path):  # the file was removed or replaced before its lock; filelock sees that only since 3.25
        lock.release()
        return None
    return lock


def is_locked(path: Path) -> bool:
    """Return whether a process holds a file's lock, without disturbing other looks as `try_lock` would."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class LockedFolder:
    """Folder with a lock, which the kernel frees when its process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FileLock | None = None
        self._inode = 0  # of the lock file

    @property
    def is_held(self) -> bool:
        return self._lock is not None

    def keeps_lock(self) -> bool:
        """Return whether this process holds the lock of the file that is there now."""
        if self._lock is not None and _inode(self.path / LOCK) != self._inode:
            self.release()
        return self.is_held

    def try_lock(self, timeout_s: float = 0.0) -> bool:
        file = self.path / LOCK
        if not self.keeps_lock() and (lock := try_lock(file, timeout_s)) is not None:
            self._lock, self._inode = lock, _inode(file)
        return self.is_held

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


@contextlib.contextmanager
def new_folder(base: Path, prefix: str) -> Iterator[Path]:
    """Make a locked new folder in `base`, removed on leaving. Raise OSError."""
    folder = LockedFolder(Path(tempfile.mkdtemp(prefix=prefix, dir=base)))
    try:
        if not folder.try_lock(LOOK_S):
            raise BlockingIOError(errno.EWOULDBLOCK, "locked by another process", str(folder.path))
        yield folder.path
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.release()


def is_left_over(folder: Path) -> bool:
    """Return whether this user's folder outlived its process."""
    try:
        if not is_own(folder):
            return False
        if not (folder / LOCK).exists() and time.time() - folder.lstat().st_mtime < _YOUNG_S:
            return False
    except OSError:
        return False
    return is_free(folder / LOCK)


def remove_left_over(base: Path, prefix: str) -> None:
    """Remove killed processes' folders."""
    for folder in filter(is_left_over, base.glob(f"{prefix}*")):
        shutil.rmtree(folder, ignore_errors=True)


def is_free(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if (lock := try_lock(path)) is not None:
            lock.release()
            return True
    return False


def _inode(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino
    return 0
