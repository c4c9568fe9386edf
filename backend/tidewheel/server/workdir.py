from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidewheel.private_dir import RUN_DIR, run_dir, run_dir_path, unwritable
from tidewheel.server import processes

CLUSTER = "cluster"  # folder of a cluster, below whose `run` its servers have theirs
_PREFIX = "serve-"
_SHM_PREFIX = "tidewheel_"
LOCK = "lock"
_OWNER = "owner"  # lies beside a server's shared memory and is locked while it lives, wherever its folder is
_YOUNG_S = 60.0  # a younger folder without a lock may be in the making
_END_GRACE_S = 1.0  # for processes whose supervisor is gone
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton's stubs exchange tensors
ENVIRONMENTS = Path("/tmp")  # noqa: S108 - where each Triton makes a folder `python_env_*`, which a killed one leaves


@dataclass(frozen=True, slots=True)
class WorkDir:
    """Private folder of one server, which holds its lock file while it runs."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def backends(self) -> Path:
        return self.root / "backends"

    @property
    def repository(self) -> Path:
        return self.root / "models"

    @property
    def control(self) -> Path:
        """Socket for commands of the server's user."""
        return self.root / "control"

    @property
    def written(self) -> Path:
        """Repository of the entries that `--model` makes."""
        return self.root / "written"

    @property
    def shm_prefix(self) -> str:
        return _shm_prefix(self.root)


@contextlib.contextmanager
def work_dir(parent: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> Iterator[WorkDir]:
    """Make a work folder in `parent`, by default the run directory; remove it on leaving.

    Inside the block, $TIDEWHEEL_RUN_DIR is its `run`. Raise `ConfigError` if it cannot be made.
    """
    named = os.environ.get(RUN_DIR)
    # A folder that is named may be open to others: the one that is made in it is not.
    base = parent or (run_dir_path() if named else run_dir())
    with _writing(base):
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(base, shared_memory)
        root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    try:
        folder = WorkDir(root)
        with _writing(base):
            folder.run.mkdir(mode=0o700)
            lock = (root / LOCK).open("wb")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.environ[RUN_DIR] = str(folder.run)
            with _owning(shared_memory / f"{folder.shm_prefix}{_OWNER}"):
                yield folder
    finally:
        _restore(named)
        remove(root, shared_memory)


@contextlib.contextmanager
def _owning(marker: Path) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # no room: Triton will say so
            fcntl.flock(held.enter_context(os.fdopen(_open_own(marker, os.O_CREAT | os.O_EXCL), "rb")), fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _writing(base: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(base, error) from None


def _restore(run_dir: str | None) -> None:
    os.environ.pop(RUN_DIR, None)
    if run_dir is not None:
        os.environ[RUN_DIR] = run_dir


def sweep(base: Path, shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove folders and shared memory of this user's killed servers. Return the removed folders in `base`."""
    for marker in shared_memory.glob(f"{_SHM_PREFIX}*_{_OWNER}"):
        if _is_free(marker):
            _leave_nothing(marker.name.removesuffix(_OWNER), shared_memory)
    return [root for root in base.glob(f"{_PREFIX}*") if is_left_over(root) and remove(root, shared_memory)]


def work_dirs(base: Path | None = None) -> list[WorkDir]:
    """Return the work folders of this user's running servers.

    Looks in `base`; without one, in the run directory (servers of their own) and below it in the cluster's.
    """
    own = run_dir_path()
    bases = [own, WorkDir(own / CLUSTER).run] if base is None else [base]
    roots = [root for folder in bases for root in sorted(folder.glob(f"{_PREFIX}*"))]
    return [WorkDir(root) for root in roots if _is_own(root) and not is_left_over(root)]


def is_left_over(root: Path) -> bool:
    """Return whether a work folder of this user outlived its server. False for other users'."""
    try:
        if not _is_own(root):
            return False
        if not (root / LOCK).exists() and time.time() - root.lstat().st_mtime < _YOUNG_S:
            return False
    except OSError:  # gone meanwhile
        return False
    return _is_free(root / LOCK)


def _is_free(path: Path) -> bool:
    """Return whether no process holds the lock on this user's file. False for another user's or a missing file."""
    try:
        with os.fdopen(_open_own(path, os.O_CREAT if path.name == LOCK else 0), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # gone meanwhile, of another user, or its server lives
        return False
    return True


def _open_own(path: Path, flags: int) -> int:
    """Open this user's file and return the descriptor. Raise OSError for another user's file or a link."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    if os.fstat(descriptor).st_uid != os.getuid():
        os.close(descriptor)
        raise PermissionError(path)
    return descriptor


def _is_own(root: Path) -> bool:
    """Return whether this user owns `root` and it is a real folder. Raise OSError if it is gone."""
    return root.lstat().st_uid == os.getuid() and root.is_dir() and not root.is_symlink()


def remove(root: Path, shared_memory: Path = SHARED_MEMORY) -> bool:
    """End a server's processes, and remove its folder and shared memory. Return whether the folder is gone."""
    _end_processes(str(WorkDir(root).run))
    _leave_nothing(_shm_prefix(root), shared_memory)
    with contextlib.suppress(OSError):
        remove_environments(WorkDir(root).backends.stat().st_mtime)  # made right before Triton was started
    shutil.rmtree(root, ignore_errors=True)
    return not root.exists()


def remove_shared_memory(prefix: str, shared_memory: Path = SHARED_MEMORY) -> None:
    """Remove the shared memory whose names begin with `prefix`, except the owner's lock file."""
    for region in shared_memory.glob(f"{prefix}*"):
        if region.name != f"{prefix}{_OWNER}":
            _unlink(region)


def _leave_nothing(prefix: str, shared_memory: Path) -> None:
    remove_shared_memory(prefix, shared_memory)
    _unlink(shared_memory / f"{prefix}{_OWNER}")


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def shared_bytes(pid: int, prefix: str, shared_memory: Path = SHARED_MEMORY) -> int:
    """Return the allocated bytes of the shared memory that a stub process was started with."""
    regions = [shared_memory / argument for argument in processes.arguments(pid) if argument.startswith(prefix)]
    return sum(region.stat().st_blocks * 512 for region in regions if region.exists())


def remove_environments(since: float, parent: Path = ENVIRONMENTS) -> None:
    """Remove this user's empty `python_env_*` folders made after `since` (epoch seconds).

    Does nothing while any tritonserver runs, because they may be that server's.
    """
    if any(process.name == "tritonserver" and process.state != "Z" for process in processes.snapshot()):
        return
    for folder in parent.glob("python_env_*"):
        with contextlib.suppress(OSError):  # not empty, or gone
            info = folder.lstat()
            if info.st_uid == os.getuid() and info.st_mtime >= since:
                folder.rmdir()


def _end_processes(run_dir: str) -> None:
    """End all processes started with this run folder or one below it: SIGTERM, then SIGKILL twice.

    A survivor would make the folder again. The second SIGKILL reaches children forked just before the first.
    """
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        started = [one for one in processes.with_folder(RUN_DIR, run_dir) if one.pid != os.getpid()]
        processes.signal_all(started, number)
        processes.wait_until(functools.partial(_have_ended, started), _END_GRACE_S)


def _have_ended(started: Sequence[processes.Process]) -> bool:
    return not any(map(processes.is_alive, started))


def _shm_prefix(root: Path) -> str:
    return f"{_SHM_PREFIX}{root.name.removeprefix(_PREFIX)}_"
