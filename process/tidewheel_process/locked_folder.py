"""Private folders that one process holds, and what is left of those whose process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = "lock"
_YOUNG_S = 60.0  # a younger folder without a lock may be in the making


class FolderError(Exception):
    """Folder that is not this user's alone, in one line that says what to change."""


def make_private(path: Path, remedy: str) -> Path:
    """Make the folder, mode 0700.

    Raise OSError, or `FolderError` with the remedy if the folder belongs to another user or is open to others.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own(path):
        raise FolderError(f"{path} must be a folder that belongs to user {os.getuid()}: {remedy}")
    if stat.S_IMODE(path.lstat().st_mode) & 0o077:
        raise FolderError(f"{path} is open to other users: run chmod 700 on it, or {remedy}")
    return path


def is_own(path: Path) -> bool:
    """Return whether the path is a real folder of this user. Raise OSError if there is none."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def try_lock(path: Path, timeout_s: float = 0.0) -> FileLock | None:
    """Hold the lock on a file, made if need be, until `release` or this process ends. None: another process has it.

    Raise PermissionError for another user's file, and OSError for a link.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_uid != os.getuid():
            raise PermissionError(path)
    lock = FileLock(path, timeout=timeout_s, mode=0o600, thread_local=False)
    try:
        lock.acquire(poll_interval=0.05)
    except Timeout:
        return None
    return lock


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on a file. The look disturbs no other look, as `try_lock` would."""
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
    """Private folder with a lock that one process holds. The kernel frees the lock of a dead process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FileLock | None = None
        self._inode = 0  # of the lock file

    @property
    def is_held(self) -> bool:
        return self._lock is not None

    def try_lock(self) -> bool:
        """Return whether this process holds the lock now. Raise OSError.

        A lock file that was removed and made again is another file, which another process may hold.
        """
        file = self.path / LOCK
        if self._lock is not None and _inode(file) != self._inode:
            self.release()
        if self._lock is None and (lock := try_lock(file)) is not None:
            self._lock, self._inode = lock, _inode(file)
        return self.is_held

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


@contextlib.contextmanager
def new_folder(base: Path, prefix: str) -> Iterator[Path]:
    """Make a locked folder in `base` with a new name; remove it on leaving. Raise OSError."""
    folder = LockedFolder(Path(tempfile.mkdtemp(prefix=prefix, dir=base)))
    try:
        folder.try_lock()
        yield folder.path
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.release()


def is_left_over(folder: Path) -> bool:
    """Return whether a folder of this user outlived the process that held it. False for other users' folders."""
    try:
        if not is_own(folder):
            return False
        if not (folder / LOCK).exists() and time.time() - folder.lstat().st_mtime < _YOUNG_S:
            return False
    except OSError:  # gone meanwhile
        return False
    return is_free(folder / LOCK)


def is_free(path: Path) -> bool:
    """Return whether no process holds the lock on this user's file. False for another user's file or a link."""
    with contextlib.suppress(OSError):
        if (lock := try_lock(path)) is not None:
            lock.release()
            return True
    return False


def _inode(path: Path) -> int:
    """Return the inode, or 0 without a file. A held file's inode is not given to another file."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino
    return 0
