"""Defects of a machine, planted one at a time into what a healthy one shows, and some of them into this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tidewheel.cli.doctor import as_table
from tidewheel.cli.machine_checks import (
    DiskSpace,
    Gpu,
    Judgement,
    Machine,
    Package,
    TorchBuild,
    TriedPart,
    find_server,
    judge,
    read_core_limit,
    read_driver,
    read_space,
)
from tidewheel.server.tritonserver import STUB_NAME
from tidewheel.settings import GIB, MIB

CPU_TORCH = TorchBuild("2.13.0+cpu", "", "torch 2.13.0+cpu is a build without CUDA: install one with it", ())
CUDA_TORCH = TorchBuild("2.13.0", "13.0", "torch 2.13.0 (CUDA 13.0) cannot use a GPU: Found no NVIDIA driver", ())
GPU_TORCH = TorchBuild("2.13.0", "13.0", "", (Gpu("NVIDIA H200", (9, 0), 139 * GIB),))
HEALTHY = Machine(
    system="Linux",
    processor="x86_64",
    python="3.12.4",
    packages=(Package("torch<2.14,>=2.11", "2.13.0+cpu"), Package("numpy>=1.26", "1.26.4")),
    server=TriedPart("/opt/tritonserver/bin/tritonserver (installed in this container)"),
    torch=CPU_TORCH,
    driver="",
    compiler=TriedPart("/usr/bin/gcc"),
    has_python_headers=False,
    shared_memory=DiskSpace(GIB, GIB, is_writable=True),
    memory_bytes=16 * GIB,
    num_cores=8,
    num_descriptors=65536,
    core_limit=None,
    used_ports=(),
    run_dir=TriedPart("/run/tidewheel"),
)
WITH_GPU = replace(HEALTHY, torch=GPU_TORCH, driver="580.65.06", has_python_headers=True)
NO_SERVER = "no tritonserver found: pip install 'tidewheel[server]' brings one; or run in a container"
OTHER_STUB = "/s/stub is built for Python 3.10, this is Python 3.12: install tidewheel with Python 3.10"
NO_COMPILER = "there is no C compiler gcc: install gcc, or set CC"

DEFECTS: dict[str, tuple[Machine, str, str, str]] = {  # machine, subject, verdict, in what is said
    "no compiler": (replace(HEALTHY, compiler=TriedPart("", NO_COMPILER)), "compiler", "warning", "install gcc"),
    "no compiler for a GPU": (
        replace(WITH_GPU, compiler=TriedPart("", NO_COMPILER)), "compiler", "error", "install gcc",
    ),
    "no headers for a GPU": (replace(WITH_GPU, has_python_headers=False), "compiler", "error", "python3-dev"),
    "no tritonserver": (replace(HEALTHY, server=TriedPart("", NO_SERVER)), "tritonserver", "error", "pip install"),
    "another stub": (replace(HEALTHY, server=TriedPart("", OTHER_STUB)), "tritonserver", "error", "with Python 3.10"),
    "full shared memory": (
        replace(HEALTHY, shared_memory=DiskSpace(3 * MIB, 64 * MIB, True)),
        "shared memory", "error", "3 MiB of 64 MiB",
    ),
    "small shared memory": (
        replace(HEALTHY, shared_memory=DiskSpace(64 * MIB, 64 * MIB, True)),
        "shared memory", "warning", "--shm-size=1g",
    ),
    "shared memory of another user": (
        replace(HEALTHY, shared_memory=DiskSpace(GIB, GIB, False)), "shared memory", "error", "is not writable",
    ),
    "no shared memory": (replace(HEALTHY, shared_memory=None), "shared memory", "error", "mount it"),
    "CUDA without a driver": (replace(HEALTHY, torch=CUDA_TORCH), "gpu", "warning", "there is no NVIDIA driver"),
    "a driver that is too old": (
        replace(HEALTHY, torch=CUDA_TORCH, driver="470.1"), "gpu", "warning", "a driver for CUDA 13.0",
    ),
    "a GPU, and torch for CPUs": (replace(HEALTHY, driver="580.1"), "gpu", "warning", "build of torch with CUDA"),
    "an old GPU": (
        replace(WITH_GPU, torch=GPU_TORCH._replace(gpus=(Gpu("Tesla T4", (7, 5), 16 * GIB),))), "gpu", "error", "8.0",
    ),
    "no torch": (replace(HEALTHY, torch=None), "gpu", "error", "install torch again"),
    "little memory": (replace(HEALTHY, memory_bytes=GIB // 2), "memory", "error", "512 MiB available"),
    "not much memory": (replace(HEALTHY, memory_bytes=3 * GIB // 2), "memory", "warning", "1.5 GiB available"),
    "memory that cannot be read": (replace(HEALTHY, memory_bytes=None), "memory", "warning", "/proc/meminfo"),
    "an old torch": (
        replace(HEALTHY, packages=(Package("torch<2.14,>=2.11", "2.9.1"),)), "packages", "error", "found: 2.9.1",
    ),
    "a missing package": (replace(HEALTHY, packages=(Package("jinja2>=3", ""),)), "packages", "error", "found: none"),
    "no installation": (replace(HEALTHY, packages=()), "packages", "warning", "with pip"),
    "ports in use": (replace(HEALTHY, used_ports=(8000, 8002)), "ports", "warning", "8000, 8002"),
    "a run directory that others can read": (
        replace(HEALTHY, run_dir=TriedPart("", "/r is open to other users: run chmod 700 on it")),
        "run directory", "error", "chmod 700",
    ),
    "a run directory on a full disk": (
        replace(HEALTHY, run_dir=TriedPart("", "/r cannot be written (No space left on device)")),
        "run directory", "error", "TIDEWHEEL_RUN_DIR",
    ),
    "a container with one core": (replace(HEALTHY, core_limit=0.5), "cores", "warning", "may use 0.5"),
    "few files": (replace(HEALTHY, num_descriptors=128), "open files", "warning", "ulimit -Hn"),
    "one core": (replace(HEALTHY, num_cores=1), "cores", "warning", "take turns"),
    "an old Python": (replace(HEALTHY, python="3.10.1"), "system", "error", "3.11 to 3.13"),
    "another system": (replace(HEALTHY, system="Darwin"), "system", "error", "use Linux"),
    "another processor": (replace(HEALTHY, processor="aarch64"), "system", "warning", "x86_64"),
}  # fmt: skip


@pytest.mark.parametrize("machine", [HEALTHY, WITH_GPU], ids=["with a CPU", "with a GPU"])
def test_a_healthy_machine(machine: Machine) -> None:
    findings = judge(machine)
    assert {one.verdict for one in findings} == {"ok"}
    assert not any(one.advice for one in findings)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named_alone_and_says_what_to_do(defect: str) -> None:
    machine, subject, verdict, said = DEFECTS[defect]
    (found,) = (one for one in judge(machine) if one.verdict != "ok")
    assert (found.subject, found.verdict) == (subject, verdict)
    assert found.seen and found.advice
    assert said in f"{found.seen}: {found.advice}"


def test_table() -> None:
    findings = [Judgement("cores", "ok", "8"), Judgement("memory", "error", "64 MiB available", "free some")]
    table = as_table(findings, "the CPU")
    assert "\n  ok       cores          8\n  error    memory         64 MiB available\n" in table
    assert f"\n{' ' * 26}→ free some\n" in table
    assert table.endswith("This machine cannot serve: 1 error")
    assert as_table(findings[:1], "the CPU").endswith("This machine can serve, on the CPU.")


def test_facts_from_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:18:51 UTC 2025\n")
    assert read_driver(file) == "580.65.06"
    for text, limit in (("150000 100000\n", 1.5), ("max 100000\n", None)):
        file.write_text(text)
        assert read_core_limit(file) == limit
    missing = tmp_path / "missing"
    assert (read_driver(missing), read_core_limit(missing), read_space(missing)) == ("", None, None)
    assert read_space(tmp_path) is not None


def installation(root: Path, python: str) -> Path:
    for part in ("bin/tritonserver", "backends/python/libtriton_python.so", f"backends/python/{STUB_NAME}"):
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        (root / part).write_bytes(b"\x7fELF\0libpython%s.so.1.0\0" % python.encode())
        (root / part).chmod(0o755)
    return root / "bin" / "tritonserver"


def test_a_stub_for_another_python_on_this_machine(tmp_path: Path) -> None:
    machine = Machine(server=find_server(str(installation(tmp_path, "3.9"))))
    assert "is built for Python 3.9" in machine.server.obstacle
    assert machine.torch is not None and machine.packages and machine.shared_memory


def test_a_server_that_does_not_run_on_this_machine(tmp_path: Path) -> None:
    binary = installation(tmp_path, f"{sys.version_info.major}.{sys.version_info.minor}")
    assert "does not run (" in find_server(str(binary)).obstacle


def test_the_command_on_this_machine(tmp_path: Path) -> None:
    """No tritonserver, no compiler, and a run directory that others can read."""
    (tmp_path / "open").mkdir(mode=0o755)
    command = [sys.executable, "-m", "tidewheel.cli.main", "doctor", "--json", "--tritonserver", "/nonexistent"]
    environment = {**os.environ, "CC": "no-such-compiler", "TIDEWHEEL_RUN_DIR": str(tmp_path / "open")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    found = {one["subject"]: one for one in report["findings"]}
    assert report["can_serve"] is False
    assert found["tritonserver"]["advice"] == "name a tritonserver, or leave it out"
    assert "no-such-compiler" in found["compiler"]["seen"]
    assert "chmod 700" in found["run directory"]["advice"]
    assert found["system"]["verdict"] == "ok"
