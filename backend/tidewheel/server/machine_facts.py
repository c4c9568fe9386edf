"""Facts about this machine, for `tidewheel doctor`."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from tidewheel.errors import ConfigError
from tidewheel.private_dir import run_dir
from tidewheel.runner.host_memory import available_host_bytes
from tidewheel.server import ServeError, launch
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.locate import locate
from tidewheel.server.processes import raise_descriptor_limit
from tidewheel.server.workdir import SHARED_MEMORY, WorkDir
from tidewheel_kernels.native.library import NativeUnavailable, find_compiler

DEFAULT_PORTS = (8000, 8001, 8002, 8003)
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_DISTRIBUTION = "tidewheel"


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    total_bytes: int


class Torch(NamedTuple):
    version: str
    cuda: str  # of the build; empty: none
    obstacle: str  # to the use of a GPU, or empty
    gpus: tuple[Gpu, ...]


class Space(NamedTuple):
    free_bytes: int
    total_bytes: int
    is_writable: bool


class Package(NamedTuple):
    requirement: str  # as in pyproject.toml
    installed: str  # version, or empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An obstacle is empty, or says what stands in the way and what to do."""

    system: str  # such as Linux
    processor: str  # such as x86_64
    python: str
    packages: tuple[Package, ...]
    server: str  # path and origin; empty with an obstacle
    server_obstacle: str
    torch: Torch | None  # None: torch cannot be imported
    driver: str  # version of NVIDIA's, or empty
    compiler: str
    compiler_obstacle: str
    has_python_headers: bool
    shared_memory: Space | None  # None: there is no /dev/shm
    memory_bytes: int | None  # available to this process
    num_cores: int
    core_limit: float | None  # of the container
    num_descriptors: int  # open files that a process may have
    used_ports: tuple[int, ...]
    run_dir: str
    run_dir_obstacle: str


def read_machine(tritonserver: str | None = None, environment: Mapping[str, str] = os.environ) -> Machine:
    server, server_obstacle = _find_server(tritonserver, environment)
    compiler, compiler_obstacle = _find_compiler(environment)
    folder, run_dir_obstacle = _try_run_dir()
    return Machine(
        system=platform.system(),
        processor=platform.machine(),
        python=platform.python_version(),
        packages=_read_packages(),
        server=server,
        server_obstacle=server_obstacle,
        torch=_read_torch(),
        driver=read_driver(DRIVER_VERSION),
        compiler=compiler,
        compiler_obstacle=compiler_obstacle,
        has_python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        shared_memory=read_space(SHARED_MEMORY),
        memory_bytes=available_host_bytes(),
        num_cores=len(os.sched_getaffinity(0)),
        core_limit=read_core_limit(CPU_LIMIT),
        num_descriptors=raise_descriptor_limit(),
        used_ports=tuple(port for port in DEFAULT_PORTS if _is_used(port)),
        run_dir=folder,
        run_dir_obstacle=run_dir_obstacle,
    )


def read_driver(path: Path) -> str:
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""


def read_core_limit(path: Path) -> float | None:
    try:
        quota, period = path.read_text(encoding="utf-8", errors="replace").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # "max": no limit
        return None


def read_space(folder: Path) -> Space | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return Space(usage.free, usage.total, os.access(folder, os.W_OK | os.X_OK))


def _find_server(tritonserver: str | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the server and no obstacle, or the other way round. Run it, because its libraries may be missing."""
    try:
        install = locate(tritonserver, environment)
    except ServeError as error:
        return "", str(error)
    place = WorkDir(Path(tempfile.gettempdir()))  # where nothing is made
    try:
        launch.known_flags(install, launch.environment(install, place, environment))
    except ServeError as error:
        what, _, why = str(error).partition(": ")
        return "", f"{what} ({why}): install what it lacks, or use NVIDIA's Triton container"
    return f"{install.binary} ({install.origin})", ""


def _find_compiler(environment: Mapping[str, str]) -> tuple[str, str]:
    try:
        return find_compiler(environment), ""
    except NativeUnavailable as error:
        return "", str(error)


def _try_run_dir() -> tuple[str, str]:
    try:
        folder = run_dir()
        with tempfile.TemporaryFile(dir=folder):
            return str(folder), ""
    except ConfigError as error:
        return "", str(error)
    except OSError as error:
        return "", f"{error.filename or 'the folder of TIDEWHEEL_RUN_DIR'} cannot be written ({error.strerror})"


def _read_packages() -> tuple[Package, ...]:
    """Return what this installation requires. Without one, there are no requirements to read."""
    try:
        texts = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return ()
    wanted = (Requirement(text) for text in texts)
    return tuple(
        Package(f"{one.name}{one.specifier}", _version(one.name))
        for one in wanted
        if one.marker is None or one.marker.evaluate({"extra": ""})
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _read_torch() -> Torch | None:
    try:
        import torch

        from tidewheel.runner.device import cuda_obstacle
    except (ImportError, OSError):
        return None
    obstacle = cuda_obstacle()
    devices = () if obstacle else map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = tuple(Gpu(one.name, (one.major, one.minor), one.total_memory) for one in devices)
    return Torch(str(torch.__version__), torch.version.cuda or "", obstacle, gpus)


def _is_used(port: int) -> bool:
    try:
        Endpoints(http=port).chosen()
    except ServeError:
        return True
    return False
