from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "tidewheel-serve-"
_LOCK = "lock"
_RUN_DIR = "TIDEWHEEL_RUN_DIR"
_YOUNG_S = 60.0  # a younger folder may be in the making
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton's stubs exchange tensors


@dataclass(frozen=True, slots=True)
class WorkDir:
    """Private folder of a server, locked while it lives."""

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
    def shm_prefix(self) -> str:
        return _shm_prefix(self.root)


@contextlib.contextmanager
def work_dir(parent: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> Iterator[WorkDir]:
    """Make a work folder in `parent`, $TIDEWHEEL_RUN_DIR or the temporary directory; remove it on leaving.

    Inside the block, $TIDEWHEEL_RUN_DIR is its `run`.
    """
    named = os.environ.get(_RUN_DIR)
    base = parent or Path(named or tempfile.gettempdir()).absolute()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    sweep(base, shared_memory)
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    try:
        with (root / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = WorkDir(root)
            folder.run.mkdir(mode=0o700)
            os.environ[_RUN_DIR] = str(folder.run)
            yield folder
    finally:
        _restore(named)
        _remove(root, shared_memory)


def _restore(run_dir: str | None) -> None:
    os.environ.pop(_RUN_DIR, None)
    if run_dir is not None:
        os.environ[_RUN_DIR] = run_dir


def sweep(base: Path, shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove and return what this user's killed servers left."""
    return [root for root in base.glob(f"{_PREFIX}*") if _is_left_over(root) and _remove(root, shared_memory)]


def _is_left_over(root: Path) -> bool:
    try:
        info = root.lstat()
        if info.st_uid != os.getuid() or not root.is_dir() or root.is_symlink():
            return False
        if time.time() - info.st_mtime < _YOUNG_S:
            return False
        with (root / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # gone meanwhile, or its server lives
        return False
    return True


def _remove(root: Path, shared_memory: Path) -> bool:
    for region in shared_memory.glob(f"{_shm_prefix(root)}*"):
        with contextlib.suppress(OSError):
            region.unlink()
    shutil.rmtree(root, ignore_errors=True)
    return not root.exists()


def _shm_prefix(root: Path) -> str:
    return f"tidewheel_{root.name.removeprefix(_PREFIX)}_"
