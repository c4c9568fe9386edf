"""Facts about this machine, and judgements from these facts alone, for `tidewheel doctor`."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

from tidewheel.errors import ConfigError
from tidewheel.private_dir import run_dir
from tidewheel.runner.device import LEAST_CAPABILITY
from tidewheel.runner.host_memory import available_host_bytes
from tidewheel.server import ServeError, tritonserver
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.tritonserver import GOOD_DESCRIPTORS, SHM_DEFAULT_BYTES
from tidewheel.server.workdir import SHARED_MEMORY, WorkDir
from tidewheel.settings import GIB, MIB, shown_bytes
from tidewheel_kernels.native.library import NativeUnavailable, find_compiler
from tidewheel_process.current_process import raise_descriptor_limit

DEFAULT_PORTS = (8000, 8001, 8002, 8003)
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
LEAST_SHM_BYTES = 2 * SHM_DEFAULT_BYTES  # a front end at its start, with room to grow once
GOOD_SHM_BYTES = 256 * MIB
LEAST_MEMORY_BYTES = 1 * GIB  # torch, a front end and the server, with a small model
GOOD_MEMORY_BYTES = 2 * GIB
GOOD_NUM_CORES = 2  # one for the engine, one for the rest

_ON_CPU = "models run on the CPU"

Verdict = Literal["ok", "warning", "error"]


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    total_bytes: int


class TorchBuild(NamedTuple):
    version: str
    cuda: str  # of the build; empty: none
    obstacle: str  # to the use of a GPU, or empty
    gpus: tuple[Gpu, ...]


class DiskSpace(NamedTuple):
    free_bytes: int
    total_bytes: int
    is_writable: bool


class TriedPart(NamedTuple):
    """Part of the machine that was found, or an obstacle: what is wrong and what to do."""

    found: str
    obstacle: str = ""


class Package(NamedTuple):
    requirement: str  # as in pyproject.toml
    installed: str  # version, or empty


def read_driver(path: Path = DRIVER_VERSION) -> str:
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _text_of(path))
    return found[1] if found else ""


def read_core_limit(path: Path = CPU_LIMIT) -> float | None:
    found = re.match(r"(\d+) (\d+)", _text_of(path))  # "max": no limit
    return int(found[1]) / int(found[2]) if found else None


def _text_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def read_space(folder: Path = SHARED_MEMORY) -> DiskSpace | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return DiskSpace(usage.free, usage.total, os.access(folder, os.W_OK | os.X_OK))


def find_server(path: str | None = None) -> TriedPart:
    """Find tritonserver and run it once, because its libraries may be missing."""
    try:
        install = tritonserver.locate(path)
    except ServeError as error:
        return TriedPart("", str(error))
    work = WorkDir(Path(tempfile.gettempdir()))  # where nothing is made
    try:
        tritonserver.known_flags(install, tritonserver.environment(install, work))
    except ServeError as error:
        what, _, why = str(error).partition(": ")
        return TriedPart("", f"{what} ({why}): install what it lacks, or use NVIDIA's Triton container")
    return TriedPart(f"{install.binary} ({install.origin})")


def _find_compiler() -> TriedPart:
    try:
        return TriedPart(find_compiler(os.environ))
    except NativeUnavailable as error:
        return TriedPart("", str(error))


def _try_run_dir() -> TriedPart:
    try:
        folder = run_dir()
        with tempfile.TemporaryFile(dir=folder):
            return TriedPart(str(folder))
    except ConfigError as error:
        return TriedPart("", str(error))
    except OSError as error:
        folder_name = error.filename or "the folder of TIDEWHEEL_RUN_DIR"
        return TriedPart("", f"{folder_name} cannot be written ({error.strerror})")


def _read_packages() -> tuple[Package, ...]:
    try:
        texts = metadata.requires("tidewheel") or []
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


def _read_torch() -> TorchBuild | None:
    try:
        import torch

        from tidewheel.runner.device import cuda_obstacle
    except (ImportError, OSError):
        return None
    obstacle = cuda_obstacle()
    devices = () if obstacle else map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = tuple(Gpu(one.name, (one.major, one.minor), one.total_memory) for one in devices)
    return TorchBuild(str(torch.__version__), torch.version.cuda or "", obstacle, gpus)


def _is_used(port: int) -> bool:
    try:
        Endpoints(http=port).chosen()
    except ServeError:
        return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    system: str = field(default_factory=platform.system)
    processor: str = field(default_factory=platform.machine)
    python: str = field(default_factory=platform.python_version)
    packages: tuple[Package, ...] = field(default_factory=_read_packages)
    server: TriedPart = field(default_factory=find_server)  # path and origin
    torch: TorchBuild | None = field(default_factory=_read_torch)  # None: torch cannot be imported
    driver: str = field(default_factory=read_driver)  # version of NVIDIA's, or empty
    compiler: TriedPart = field(default_factory=_find_compiler)
    has_python_headers: bool = field(default_factory=(Path(sysconfig.get_path("include")) / "Python.h").is_file)
    shared_memory: DiskSpace | None = field(default_factory=read_space)  # None: there is no /dev/shm
    memory_bytes: int | None = field(default_factory=available_host_bytes)  # available to this process
    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    core_limit: float | None = field(default_factory=read_core_limit)  # of the container
    num_descriptors: int = field(default_factory=raise_descriptor_limit)  # open files that a process may have
    used_ports: tuple[int, ...] = field(default_factory=lambda: tuple(filter(_is_used, DEFAULT_PORTS)))
    run_dir: TriedPart = field(default_factory=_try_run_dir)


class Judgement(NamedTuple):
    subject: str
    verdict: Verdict  # error: nothing can be served; warning: not all, or not well
    seen: str
    advice: str = ""


CheckResult = tuple[Verdict, str] | tuple[Verdict, str, str]  # verdict, what was seen, advice


def judge(machine: Machine) -> list[Judgement]:
    findings = [Judgement(subject, *check(machine)) for subject, check in CHECKS.items()]
    return [one._replace(advice="") if one.verdict == "ok" else one for one in findings]


def _check_system(machine: Machine) -> CheckResult:
    seen = f"{machine.system} on {machine.processor}, Python {machine.python}"
    version = tuple(int(part) for part in machine.python.split(".")[:2])
    if machine.system != "Linux":
        return "error", seen, "use Linux, or a container with it"
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        return "error", seen, f"use Python {_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}"
    if machine.processor != "x86_64":
        return "warning", seen, "use x86_64: nothing was tried on other processors"
    return "ok", seen


def _check_packages(machine: Machine) -> CheckResult:
    unfit = [
        f"{one.requirement} (found: {one.installed or 'none'})"
        for one in machine.packages
        if not one.installed or one.installed not in Requirement(one.requirement).specifier
    ]
    if not machine.packages:
        advice = "install tidewheel with pip, so that versions can be compared"
        return "warning", "tidewheel is not installed as a package", advice
    if unfit:
        return "error", f"needs {'; '.join(unfit)}", "install these versions with pip"
    return "ok", f"{len(machine.packages)} in the versions that are needed"


def _check_gpu(machine: Machine) -> CheckResult:
    torch, driver = machine.torch, machine.driver
    if torch is None:
        return "error", "torch cannot be imported", "install torch again"
    if gpus := torch.gpus:
        seen = "; ".join(f"{one.name}, {_dotted(one.capability)}, {one.total_bytes / GIB:.0f} GiB" for one in gpus)
        least = f"compute capability {_dotted(LEAST_CAPABILITY)}"
        advice = f"use a GPU of at least {least}, or set device to cpu"
        return "ok" if gpus[0].capability >= LEAST_CAPABILITY else "error", seen, advice
    if torch.cuda and not driver:
        seen = f"torch {torch.version} is built for CUDA {torch.cuda}, and there is no NVIDIA driver"
        advice = "install NVIDIA's driver, or start the container with --gpus all; for a machine without a GPU, "
        return "warning", f"{seen}; {_ON_CPU}", f"{advice}torch's build for CPUs is smaller"
    if torch.cuda:
        advice = f"install a driver for CUDA {torch.cuda}, and look at nvidia-smi"
        return "warning", f"driver {driver}: {torch.obstacle}; {_ON_CPU}", advice
    if driver:
        seen = f"driver {driver}, and torch {torch.version} is built without CUDA; {_ON_CPU}"
        return "warning", seen, "install the build of torch with CUDA (docs/install.md)"
    return "ok", f"none, and torch {torch.version} for CPUs"


def _check_compiler(machine: Machine) -> CheckResult:
    has_gpu = machine.torch is not None and bool(machine.torch.gpus)
    if has_gpu and machine.compiler.found and not machine.has_python_headers:
        seen = f"{machine.compiler.found}, and no Python.h, which triton-lang needs on a GPU"
        return "error", seen, "install Python's headers (Debian: python3-dev)"
    return _check_part(machine.compiler, "error" if has_gpu else "warning")


def _check_shared_memory(machine: Machine) -> CheckResult:
    space = machine.shared_memory
    if space is None or not space.is_writable:
        seen = f"{SHARED_MEMORY} {'is missing' if space is None else 'is not writable'}"
        return "error", seen, "mount it: Triton passes requests through it"
    seen = f"{shown_bytes(space.free_bytes)} of {shown_bytes(space.total_bytes)} free in {SHARED_MEMORY}"
    advice = "remove what ended programs left there, or enlarge it (docker run --shm-size=1g)"
    return _check_bytes(space.free_bytes, LEAST_SHM_BYTES, GOOD_SHM_BYTES), seen, advice


def _check_memory(machine: Machine) -> CheckResult:
    available = machine.memory_bytes
    if available is None:
        return "warning", "not known", "look at it yourself: /proc/meminfo cannot be read"
    verdict = _check_bytes(available, LEAST_MEMORY_BYTES, GOOD_MEMORY_BYTES)
    advice = f"have {shown_bytes(GOOD_MEMORY_BYTES)} free beside the model"
    return verdict, f"{shown_bytes(available)} available", advice


def _check_bytes(found: int, least: int, good: int) -> Verdict:
    return "ok" if found >= good else "warning" if found >= least else "error"


def _check_cores(machine: Machine) -> CheckResult:
    limit = machine.core_limit
    seen = f"{machine.num_cores}" + (f", of which the container may use {limit:g}" if limit is not None else "")
    has_enough = min(machine.num_cores, limit or machine.num_cores) >= GOOD_NUM_CORES
    return "ok" if has_enough else "warning", seen, "allow two: the engine and the server take turns on one"


def _check_descriptors(machine: Machine) -> CheckResult:
    seen = f"{machine.num_descriptors} at most"
    if machine.num_descriptors >= GOOD_DESCRIPTORS:
        return "ok", seen
    advice = f"allow {GOOD_DESCRIPTORS} (ulimit -Hn, docker run --ulimit nofile)"
    return "warning", f"{seen}, one for each connection; further clients wait without an answer", advice


def _check_ports(machine: Machine) -> CheckResult:
    if not machine.used_ports:
        return "ok", "8000, 8001, 8002 and 8003 are free"
    advice = "choose others with --http-port, --grpc-port, --metrics-port and --health-port (0 takes a free one)"
    return "warning", f"in use: {', '.join(map(str, machine.used_ports))}", advice


def _check_part(part: TriedPart, verdict: Verdict, advice: str = "") -> CheckResult:
    if not part.obstacle:
        return "ok", part.found
    seen, _, remedy = part.obstacle.partition(": ")
    return verdict, seen, remedy or advice


CHECKS: dict[str, Callable[[Machine], CheckResult]] = {
    "system": _check_system,
    "packages": _check_packages,
    "tritonserver": lambda machine: _check_part(machine.server, "error"),
    "gpu": _check_gpu,
    "compiler": _check_compiler,
    "shared memory": _check_shared_memory,
    "memory": _check_memory,
    "cores": _check_cores,
    "open files": _check_descriptors,
    "ports": _check_ports,
    "run directory": lambda machine: _check_part(machine.run_dir, "error", "set TIDEWHEEL_RUN_DIR to another"),
}


def describe_device(torch: TorchBuild | None) -> str:
    return torch.gpus[0].name if torch is not None and torch.gpus else "the CPU"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
