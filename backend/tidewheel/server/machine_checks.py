"""Judgements about a machine, for `tidewheel doctor`. Each is a function of facts alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

from tidewheel.byte_sizes import GIB, MIB, shown_bytes
from tidewheel.runner.device import LEAST_CAPABILITY
from tidewheel.server.launch import SHM_DEFAULT_BYTES
from tidewheel.server.machine_facts import Gpu, Machine, Torch
from tidewheel.server.processes import GOOD_DESCRIPTORS
from tidewheel.server.workdir import SHARED_MEMORY

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
LEAST_SHM_BYTES = 2 * SHM_DEFAULT_BYTES  # a front end at its start, with room to grow once
GOOD_SHM_BYTES = 256 * MIB
LEAST_MEMORY_BYTES = 1 * GIB  # torch, a front end and the server, with a small model
GOOD_MEMORY_BYTES = 2 * GIB
GOOD_NUM_CORES = 2  # one for the engine, one for the rest

_ON_CPU = "models run on the CPU"

Verdict = Literal["ok", "warning", "error"]


class Judgement(NamedTuple):
    subject: str
    verdict: Verdict  # error: nothing can be served; warning: not all, or not well
    seen: str
    advice: str = ""


def judge(machine: Machine) -> list[Judgement]:
    return [check(machine) for check in CHECKS]


def check_system(machine: Machine) -> Judgement:
    seen = f"{machine.system} on {machine.processor}, Python {machine.python}"
    version = tuple(int(part) for part in machine.python.split(".")[:2])
    if machine.system != "Linux":
        return Judgement("system", "error", seen, "use Linux, or a container with it")
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        return Judgement("system", "error", seen, f"use Python {_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}")
    if machine.processor != "x86_64":
        return Judgement("system", "warning", seen, "use x86_64: nothing was tried on other processors")
    return Judgement("system", "ok", seen)


def check_packages(machine: Machine) -> Judgement:
    unfit = [
        f"{one.requirement} (found: {one.installed or 'none'})"
        for one in machine.packages
        if not one.installed or one.installed not in Requirement(one.requirement).specifier
    ]
    if not machine.packages:
        advice = "install tidewheel with pip, so that versions can be compared"
        return Judgement("packages", "warning", "tidewheel is not installed as a package", advice)
    if unfit:
        return Judgement("packages", "error", f"needs {'; '.join(unfit)}", "install these versions with pip")
    return Judgement("packages", "ok", f"{len(machine.packages)} in the versions that are needed")


def check_server(machine: Machine) -> Judgement:
    if not machine.server_obstacle:
        return Judgement("tritonserver", "ok", machine.server)
    return _of_obstacle("tritonserver", "error", machine.server_obstacle)


def check_gpu(machine: Machine) -> Judgement:
    torch, driver = machine.torch, machine.driver
    if torch is None:
        return Judgement("gpu", "error", "torch cannot be imported", "install torch again")
    if torch.gpus:
        return _judge_gpus(torch.gpus)
    if torch.cuda and not driver:
        return Judgement(
            "gpu",
            "warning",
            f"torch {torch.version} is built for CUDA {torch.cuda}, and there is no NVIDIA driver; {_ON_CPU}",
            "install NVIDIA's driver, or start the container with --gpus all; for a machine without a GPU, torch's "
            "build for CPUs is smaller",
        )
    if torch.cuda:
        seen = f"driver {driver}: {torch.obstacle}; {_ON_CPU}"
        return Judgement("gpu", "warning", seen, f"install a driver for CUDA {torch.cuda}, and look at nvidia-smi")
    if driver:
        seen = f"driver {driver}, and torch {torch.version} is built without CUDA; {_ON_CPU}"
        return Judgement("gpu", "warning", seen, "install the build of torch with CUDA (docs/install.md)")
    return Judgement("gpu", "ok", f"none, and torch {torch.version} for CPUs")


def _judge_gpus(gpus: tuple[Gpu, ...]) -> Judgement:
    seen = "; ".join(f"{one.name}, {_dotted(one.capability)}, {one.total_bytes / GIB:.0f} GiB" for one in gpus)
    if gpus[0].capability < LEAST_CAPABILITY:
        least = f"compute capability {_dotted(LEAST_CAPABILITY)}"
        return Judgement("gpu", "error", seen, f"use a GPU of at least {least}, or set device to cpu")
    return Judgement("gpu", "ok", seen)


def check_compiler(machine: Machine) -> Judgement:
    has_gpu = machine.torch is not None and bool(machine.torch.gpus)
    verdict: Verdict = "error" if has_gpu else "warning"
    if machine.compiler_obstacle:
        return _of_obstacle("compiler", verdict, machine.compiler_obstacle)
    if has_gpu and not machine.has_python_headers:
        seen = f"{machine.compiler}, and no Python.h, which triton-lang needs on a GPU"
        return Judgement("compiler", "error", seen, "install Python's headers (Debian: python3-dev)")
    return Judgement("compiler", "ok", machine.compiler)


def check_shared_memory(machine: Machine) -> Judgement:
    space, subject = machine.shared_memory, "shared memory"
    if space is None or not space.is_writable:
        seen = f"{SHARED_MEMORY} {'is missing' if space is None else 'is not writable'}"
        return Judgement(subject, "error", seen, "mount it: Triton passes requests through it")
    seen = f"{shown_bytes(space.free_bytes)} of {shown_bytes(space.total_bytes)} free in {SHARED_MEMORY}"
    if space.free_bytes >= GOOD_SHM_BYTES:
        return Judgement(subject, "ok", seen)
    verdict: Verdict = "error" if space.free_bytes < LEAST_SHM_BYTES else "warning"
    advice = "remove what ended programs left there, or enlarge it (docker run --shm-size=1g)"
    return Judgement(subject, verdict, seen, advice)


def check_memory(machine: Machine) -> Judgement:
    available = machine.memory_bytes
    if available is None:
        return Judgement("memory", "warning", "not known", "look at it yourself: /proc/meminfo cannot be read")
    seen = f"{shown_bytes(available)} available"
    if available >= GOOD_MEMORY_BYTES:
        return Judgement("memory", "ok", seen)
    verdict: Verdict = "error" if available < LEAST_MEMORY_BYTES else "warning"
    return Judgement("memory", verdict, seen, f"have {shown_bytes(GOOD_MEMORY_BYTES)} free beside the model")


def check_cores(machine: Machine) -> Judgement:
    limit = machine.core_limit
    seen = f"{machine.num_cores}" + (f", of which the container may use {limit:g}" if limit is not None else "")
    if min(machine.num_cores, limit or machine.num_cores) < GOOD_NUM_CORES:
        return Judgement("cores", "warning", seen, "allow two: the engine and the server take turns on one")
    return Judgement("cores", "ok", seen)


def check_descriptors(machine: Machine) -> Judgement:
    if machine.num_descriptors >= GOOD_DESCRIPTORS:
        return Judgement("open files", "ok", f"{machine.num_descriptors} at most")
    seen = f"{machine.num_descriptors} at most, one for each connection; further clients wait without an answer"
    return Judgement(
        "open files", "warning", seen, f"allow {GOOD_DESCRIPTORS} (ulimit -Hn, docker run --ulimit nofile)"
    )


def check_ports(machine: Machine) -> Judgement:
    if not machine.used_ports:
        return Judgement("ports", "ok", "8000, 8001, 8002 and 8003 are free")
    seen = f"in use: {', '.join(map(str, machine.used_ports))}"
    advice = "choose others with --http-port, --grpc-port, --metrics-port and --health-port (0 takes a free one)"
    return Judgement("ports", "warning", seen, advice)


def check_run_dir(machine: Machine) -> Judgement:
    if machine.run_dir_obstacle:
        return _of_obstacle("run directory", "error", machine.run_dir_obstacle, "set TIDEWHEEL_RUN_DIR to another")
    return Judgement("run directory", "ok", machine.run_dir)


CHECKS: tuple[Callable[[Machine], Judgement], ...] = (
    check_system,
    check_packages,
    check_server,
    check_gpu,
    check_compiler,
    check_shared_memory,
    check_memory,
    check_cores,
    check_descriptors,
    check_ports,
    check_run_dir,
)


def describe_device(torch: Torch | None) -> str:
    return torch.gpus[0].name if torch is not None and torch.gpus else "the CPU"


def _of_obstacle(subject: str, verdict: Verdict, obstacle: str, otherwise: str = "") -> Judgement:
    """Take an error's message apart: what is wrong, and what to do."""
    seen, _, advice = obstacle.partition(": ")
    return Judgement(subject, verdict, seen, advice or otherwise)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
