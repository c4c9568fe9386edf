import contextlib
import os
import platform
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from packaging.requirements import Requirement

from tidewheel.errors import ConfigError
from tidewheel.private_dir import run_dir
from tidewheel.runner.device import LEAST_CAPABILITY, cuda_obstacle, dotted
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

Verdict = Literal["ok", "warning", "error"]


class Judgement(NamedTuple):
    subject: str
    verdict: Verdict  # error: nothing can be served; warning: not all, or not well
    seen: str
    advice: str = ""


CheckResult = tuple[Verdict, str, str]  # verdict, what was seen, advice


def judge(tritonserver_path: str | None, gpus: list[Any]) -> list[Judgement]:
    """Return a judgement per check of this machine. `gpus`: from `usable_gpus`."""
    checks: dict[str, Callable[[], CheckResult]] = {
        "system": _check_system,
        "packages": _check_packages,
        "tritonserver": partial(check_server, tritonserver_path),
        "gpu": partial(_check_gpu, gpus),
        "compiler": partial(_check_compiler, has_gpu=bool(gpus)),
        "shared memory": _check_shared_memory,
        "memory": _check_memory,
        "cores": _check_cores,
        "open files": _check_descriptors,
        "ports": _check_ports,
        "run directory": _check_run_dir,
    }
    findings = [Judgement(subject, *check()) for subject, check in checks.items()]
    return [one._replace(advice="") if one.verdict == "ok" else one for one in findings]


def usable_gpus() -> list[Any]:
    return [] if cuda_obstacle() else [*map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))]


def _check_system() -> CheckResult:
    seen = f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}"
    version = tuple(int(part) for part in platform.python_version_tuple()[:2])
    if platform.system() != "Linux":
        return "error", seen, "use Linux, or a container with it"
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        return "error", seen, f"use Python {dotted(OLDEST_PYTHON)} to {dotted(NEWEST_PYTHON)}"
    verdict: Verdict = "ok" if platform.machine() == "x86_64" else "warning"
    return verdict, seen, "use x86_64: nothing was tried on other processors"


def _check_packages() -> CheckResult:
    try:
        requirements = [Requirement(text) for text in metadata.requires("tidewheel") or []]
    except metadata.PackageNotFoundError:
        requirements = []
    if not requirements:
        advice = "install tidewheel with pip, so that versions can be compared"
        return "warning", "tidewheel is not installed as a package", advice
    needed = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    versions = [(one, _version(one.name)) for one in needed]
    unfit = [
        f"{one.name}{one.specifier} (found: {version or 'none'})"
        for one, version in versions
        if not version or version not in one.specifier
    ]
    if unfit:
        return "error", f"needs {'; '.join(unfit)}", "install these versions with pip"
    return "ok", f"{len(versions)} in the versions that are needed", ""


def _version(name: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""


def check_server(path: str | None) -> CheckResult:
    """Find tritonserver and run it once, because its libraries may be missing."""
    try:
        install = tritonserver.locate(path)
    except ServeError as error:
        return _obstacle(error, "error")
    work = WorkDir(Path(tempfile.gettempdir()))  # where nothing is made
    try:
        tritonserver.known_flags(install, tritonserver.environment(install, work))
    except ServeError as error:
        what, _, why = str(error).partition(": ")
        return "error", f"{what} ({why})", "install what it lacks, or use NVIDIA's Triton container"
    return "ok", f"{install.binary} ({install.origin})", ""


def _check_gpu(gpus: list[Any]) -> CheckResult:
    build, cuda = torch.__version__, torch.version.cuda
    found = _found_in(DRIVER_VERSION, r"\s(\d+\.\d+(?:\.\d+)?)\s")
    driver = found[1] if found else ""
    if gpus:
        capabilities = [(one.major, one.minor) for one in gpus]
        pairs = zip(gpus, capabilities, strict=True)
        seen = "; ".join(f"{one.name}, {dotted(own)}, {one.total_memory / GIB:.0f} GiB" for one, own in pairs)
        advice = f"use a GPU of at least compute capability {dotted(LEAST_CAPABILITY)}, or set device to cpu"
        return "ok" if capabilities[0] >= LEAST_CAPABILITY else "error", seen, advice
    if cuda and not driver:
        seen = f"torch {build} is built for CUDA {cuda}, and there is no NVIDIA driver"
        advice = "install NVIDIA's driver, or start the container with --gpus all; for a machine without a GPU, "
        advice += "torch's build for CPUs is smaller"
    elif cuda:
        seen = f"driver {driver}: {cuda_obstacle()}"
        advice = f"install a driver for CUDA {cuda}, and look at nvidia-smi"
    elif driver:
        seen = f"driver {driver}, and torch {build} is built without CUDA"
        advice = "install the build of torch with CUDA (docs/install.md)"
    else:
        return "ok", f"none, and torch {build} for CPUs", ""
    return "warning", f"{seen}; models run on the CPU", advice


def _check_compiler(*, has_gpu: bool) -> CheckResult:
    try:
        compiler = find_compiler(os.environ)
    except NativeUnavailable as error:
        return _obstacle(error, "error" if has_gpu else "warning")
    if has_gpu and not Path(sysconfig.get_path("include"), "Python.h").is_file():
        seen = f"{compiler}, and no Python.h, which triton-lang needs on a GPU"
        return "error", seen, "install Python's headers (Debian: python3-dev)"
    return "ok", compiler, ""


def _check_shared_memory() -> CheckResult:
    advice = "mount it: Triton passes requests through it"
    try:
        space = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return "error", f"{SHARED_MEMORY} is missing", advice
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return "error", f"{SHARED_MEMORY} is not writable", advice
    seen = f"{shown_bytes(space.free)} of {shown_bytes(space.total)} free in {SHARED_MEMORY}"
    advice = "remove what ended programs left there, or enlarge it (docker run --shm-size=1g)"
    return _check_bytes(space.free, LEAST_SHM_BYTES, GOOD_SHM_BYTES), seen, advice


def _check_memory() -> CheckResult:
    available = available_host_bytes()
    verdict = _check_bytes(available, LEAST_MEMORY_BYTES, GOOD_MEMORY_BYTES)
    advice = f"have {shown_bytes(GOOD_MEMORY_BYTES)} free beside the model"
    return verdict, f"{shown_bytes(available)} available", advice


def _check_bytes(found: int, least: int, good: int) -> Verdict:
    return "ok" if found >= good else "warning" if found >= least else "error"


def _check_cores() -> CheckResult:
    limit = _found_in(CPU_LIMIT, r"(\d+) (\d+)")  # "max": no limit
    num_cores = len(os.sched_getaffinity(0))
    usable = num_cores if limit is None else int(limit[1]) / int(limit[2])
    seen = f"{num_cores}" + (f", of which the container may use {usable:g}" if limit is not None else "")
    verdict: Verdict = "ok" if min(num_cores, usable) >= GOOD_NUM_CORES else "warning"
    return verdict, seen, "allow two: the engine and the server take turns on one"


def _check_descriptors() -> CheckResult:
    seen = f"{(limit := raise_descriptor_limit())} at most"
    if limit >= GOOD_DESCRIPTORS:
        return "ok", seen, ""
    advice = f"allow {GOOD_DESCRIPTORS} (ulimit -Hn, docker run --ulimit nofile)"
    return "warning", f"{seen}, one for each connection; further clients wait without an answer", advice


def _check_ports() -> CheckResult:
    used = [str(port) for port in DEFAULT_PORTS if _is_used(port)]
    if not used:
        return "ok", "8000, 8001, 8002 and 8003 are free", ""
    advice = "choose others with --http-port, --grpc-port, --metrics-port and --health-port (0 takes a free one)"
    return "warning", f"in use: {', '.join(used)}", advice


def _is_used(port: int) -> bool:
    with contextlib.suppress(ServeError):
        Endpoints(http=port).chosen()
        return False
    return True


def _check_run_dir() -> CheckResult:
    try:
        folder = run_dir()
        with tempfile.TemporaryFile(dir=folder):
            return "ok", str(folder), ""
    except ConfigError as error:
        return _obstacle(error, "error")
    except OSError as error:
        seen = f"{error.filename or 'the folder of TIDEWHEEL_RUN_DIR'} cannot be written ({error.strerror})"
        return "error", seen, "set TIDEWHEEL_RUN_DIR to another"


def _obstacle(error: Exception, verdict: Verdict) -> CheckResult:
    seen, _, remedy = str(error).partition(": ")
    return verdict, seen, remedy


def _found_in(path: Path, pattern: str) -> re.Match[str] | None:
    with contextlib.suppress(OSError):
        return re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
    return None
