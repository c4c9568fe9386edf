import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tidewheel.private_dir import RUN_DIR, read_value, run_dir, run_dir_path, unwritable, write_value
from tidewheel.server import ServeError
from tidewheel.server.endpoints import Endpoints
from tidewheel_process import process_tree
from tidewheel_process.child import Guard, guard
from tidewheel_process.locked_folder import LOOK_S, is_free, is_left_over, is_own, new_folder, try_lock, unlock

CLUSTER = "cluster"  # folder of a cluster, whose `run` holds its servers' folders
ENDPOINTS = "endpoints.json"
_PREFIX = "serve-"
_SHM_PREFIX = "tidewheel_"
_OWNER = "owner"  # lock file beside a server's shared memory, held while the server lives
_END_GRACE_S = 1.0  # for processes whose supervisor is gone
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton's stubs exchange tensors
ENVIRONMENTS = Path("/tmp")  # noqa: S108 - where each Triton makes a folder `python_env_*`


@dataclass
class WorkDir:
    root: Path

    def __post_init__(self) -> None:
        self.run = self.root / "run"
        self.backends = self.root / "backends"
        self.repository = self.root / "models"
        self.written = self.root / "written"  # repository of the entries that `--model` makes
        self.control = self.root / "control"
        self.endpoints_file = self.root / ENDPOINTS
        self.shm_prefix = f"{_SHM_PREFIX}{self.root.name.removeprefix(_PREFIX)}_"


@contextlib.contextmanager
def work_dir(parent: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> Iterator[WorkDir]:
    """Make a work folder in `parent` (default: the run directory). Raise `ConfigError`.

    In the block $TIDEWHEEL_RUN_DIR is its `run`.
    """
    named = os.environ.get(RUN_DIR)
    # A named folder may be open to others: the work folder in it is not.
    base = parent or (run_dir_path() if named else run_dir())
    with contextlib.ExitStack() as held:
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            sweep(base, shared_memory)
            folder = WorkDir(held.enter_context(new_folder(base, _PREFIX)))
            held.callback(remove, folder.root, shared_memory)
            folder.run.mkdir(mode=0o700)
        except OSError as error:
            raise unwritable(base, error) from None
        with contextlib.suppress(OSError):  # no room: Triton will say so
            if (lock := try_lock(shared_memory / f"{folder.shm_prefix}{_OWNER}", LOOK_S)) is not None:
                held.callback(unlock, lock)
        if named is not None:
            held.callback(os.environ.update, {RUN_DIR: named})
        held.callback(os.environ.pop, RUN_DIR, None)
        os.environ[RUN_DIR] = str(folder.run)
        yield folder


def guarded(root: Path) -> Guard:
    """Return a guard process that calls `remove` when this process ends."""
    environment = {key: value for key, value in os.environ.items() if key != RUN_DIR}
    return Guard([sys.executable, "-P", "-m", __name__, str(root)], environment)


def sweep(base: Path, shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove folders in `base` and shared memory of this user's killed servers. Return the folders."""
    for marker in shared_memory.glob(f"{_SHM_PREFIX}*_{_OWNER}"):
        if is_free(marker):
            remove_shared_memory(marker.name.removesuffix(_OWNER), shared_memory, with_owner=True)
    return [root for root in base.glob(f"{_PREFIX}*") if is_left_over(root) and remove(root, shared_memory)]


def remove(root: Path, shared_memory: Path = SHARED_MEMORY) -> bool:
    """End a server's processes, remove its folder and shared memory. Return whether the folder is gone."""
    work = WorkDir(root)
    process_tree.end_all(lambda: process_tree.started_with(RUN_DIR, str(work.run)), _END_GRACE_S)
    remove_shared_memory(work.shm_prefix, shared_memory, with_owner=True)
    with contextlib.suppress(OSError):
        remove_environments(work.backends.stat().st_mtime)  # made right before Triton was started
    shutil.rmtree(root, ignore_errors=True)
    return not root.exists()


def remove_shared_memory(prefix: str, shared_memory: Path = SHARED_MEMORY, *, with_owner: bool = False) -> None:
    """Remove a Triton server's shared memory, and last, `with_owner`, its lock file."""
    owner = shared_memory / f"{prefix}{_OWNER}"
    for region in shared_memory.glob(f"{prefix}*"):
        if region != owner:
            _unlink(region)
    if with_owner:
        _unlink(owner)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def shared_bytes(pid: int, prefix: str, shared_memory: Path = SHARED_MEMORY) -> int:
    regions = [shared_memory / word for word in process_tree.arguments(pid) if word.startswith(prefix)]
    return sum(region.stat().st_blocks * 512 for region in regions if region.exists())


def remove_environments(since: float, parent: Path = ENVIRONMENTS) -> None:
    """Remove empty `python_env_*` folders made after `since` (epoch seconds), unless a Triton runs."""
    if process_tree.is_running("tritonserver"):
        return
    for folder in parent.glob("python_env_*"):
        with contextlib.suppress(OSError):  # not empty, or gone
            info = folder.lstat()
            if info.st_uid == os.getuid() and info.st_mtime >= since:
                folder.rmdir()


def running_servers(base: Path | None = None) -> list[tuple[WorkDir, Endpoints]]:
    """Return this user's running servers in `base` (None: the run directory and its cluster's)."""
    own = run_dir_path()
    bases = [own, WorkDir(own / CLUSTER).run] if base is None else [base]
    roots = [root for folder in bases for root in sorted(folder.glob(f"{_PREFIX}*"))]
    running = [WorkDir(root) for root in roots if is_own(root) and not is_left_over(root)]
    return [(work, ports) for work in running if (ports := read_value(work.endpoints_file, Endpoints)) is not None]


def current_engines_of(metrics_port: int) -> list[Path]:
    """Return engine links of the server with this port, else of a Triton without `tidewheel serve`."""
    from tidewheel.engine.folder import CURRENT  # imports numpy, which a guard has no use for

    for work, endpoints in running_servers():
        if endpoints.metrics == metrics_port:
            return sorted(work.run.glob(f"*/{CURRENT}"))
    alone = run_dir_path()
    with contextlib.suppress(OSError):
        return sorted(alone.glob(f"*/{CURRENT}")) if is_own(alone) else []
    return []


def server_of(port: int | None) -> tuple[WorkDir, Endpoints]:
    """Return folder and ports of the server with `port` (None: the only server). Raise `ServeError`."""
    found = [(work, ports) for work, ports in running_servers() if port is None or port in dataclasses.astuple(ports)]
    if not found:
        raise ServeError("no server of this user runs here" + (f" with port {port}" if port is not None else ""))
    if len(found) > 1:
        ports = ", ".join(str(endpoints.http) for _, endpoints in found)
        raise ServeError(f"several servers of this user run: name one with --server PORT ({ports})")
    return found[0]


def control_of(port: int | None) -> Path:
    """Return the control socket of the server with `port` (None: the only server). Raise `ServeError`."""
    work, endpoints = server_of(port)
    if not work.control.exists():
        raise ServeError(
            f"the server at port {endpoints.http} takes no such command: start it with --model-control explicit, "
            "without --open-api model-repository"
        )
    return work.control


def ports_file(path: Path | None, endpoints: Endpoints) -> contextlib.ExitStack:
    """Write the ports to a file, which the end of the block removes. Raise `ServeError` if it cannot be written."""
    end = contextlib.ExitStack()
    if path is not None:
        try:
            write_value(path, endpoints)
        except OSError as error:
            raise ServeError(f"--ports-file {str(path)!r} cannot be written: {error.strerror}") from None
        end.callback(_unlink, path)
    return end


if __name__ == "__main__":
    guard(lambda: remove(Path(sys.argv[1])))
