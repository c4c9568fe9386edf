"""Defects of a machine, planted one at a time into what a healthy one shows, and some of them into this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewheel.cli.doctor import as_table
from tidewheel.cli.machine_checks import CheckResult, Judgement, check_server, judge
from tidewheel.errors import ConfigError
from tidewheel.server import ServeError
from tidewheel.server.tritonserver import STUB_NAME, TritonInstall
from tidewheel.settings import GIB, MIB
from tidewheel_kernels.native.library import NativeUnavailable

H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139 * GIB)
T4 = SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=16 * GIB)
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sun Jul 27 07:18:51 UTC 2025\n"
INSTALL = TritonInstall(Path("/opt/tritonserver/bin/tritonserver"), Path(), Path(), (), "installed in this container")
NO_SERVER = ServeError("no tritonserver found: pip install 'tidewheel[server]' brings one; or run in a container")
OTHER_STUB = ServeError("/s/stub is built for Python 3.10, this is Python 3.12: install tidewheel with Python 3.10")
NO_COMPILER = NativeUnavailable("there is no C compiler gcc: install gcc, or set CC")
OPEN_RUN_DIR = ConfigError("/r is open to other users: run chmod 700 on it")
FULL_DISK = OSError(28, "No space left on device", "/r")
VERSIONS = {"torch": "2.13.0+cpu", "numpy": "1.26.4"}

Facts = Mapping[str, Any]
HEALTHY: Facts = {
    "system": "Linux", "processor": "x86_64", "python": "3.12.4", "versions": VERSIONS, "server": INSTALL, "gpus": [],
    "cuda": None, "driver": "", "compiler": "/usr/bin/gcc", "has_headers": False, "space": (GIB, GIB),
    "is_writable": True, "memory": 16 * GIB, "cores": 8, "cpu_limit": "max 100000", "descriptors": 65536, "used": (),
    "run_dir": None,
}  # fmt: skip
WITH_GPU: Facts = {**HEALTHY, "gpus": [H200], "cuda": "13.0", "driver": "580.65.06", "has_headers": True}

DEFECTS: dict[str, tuple[Facts, Facts, str, str, str]] = {  # machine, defect, subject, verdict, in what is said
    "no compiler": (HEALTHY, {"compiler": NO_COMPILER}, "compiler", "warning", "install gcc"),
    "no compiler for a GPU": (WITH_GPU, {"compiler": NO_COMPILER}, "compiler", "error", "install gcc"),
    "no headers for a GPU": (WITH_GPU, {"has_headers": False}, "compiler", "error", "python3-dev"),
    "no tritonserver": (HEALTHY, {"server": NO_SERVER}, "tritonserver", "error", "pip install"),
    "another stub": (HEALTHY, {"server": OTHER_STUB}, "tritonserver", "error", "with Python 3.10"),
    "full shared memory": (HEALTHY, {"space": (64 * MIB, 3 * MIB)}, "shared memory", "error", "3 MiB of 64 MiB"),
    "small shared memory": (HEALTHY, {"space": (64 * MIB,) * 2}, "shared memory", "warning", "--shm-size=1g"),
    "shared memory of another user": (
        HEALTHY, {"is_writable": False}, "shared memory", "error", "is not writable",
    ),
    "no shared memory": (HEALTHY, {"space": None}, "shared memory", "error", "mount it"),
    "CUDA without a driver": (HEALTHY, {"cuda": "13.0"}, "gpu", "warning", "there is no NVIDIA driver"),
    "a driver that is too old": (
        HEALTHY, {"cuda": "13.0", "driver": "470.1"}, "gpu", "warning", "a driver for CUDA 13.0",
    ),
    "a GPU, and torch for CPUs": (HEALTHY, {"driver": "580.1"}, "gpu", "warning", "build of torch with CUDA"),
    "an old GPU": (WITH_GPU, {"gpus": [T4]}, "gpu", "error", "8.0"),
    "little memory": (HEALTHY, {"memory": GIB // 2}, "memory", "error", "512 MiB available"),
    "not much memory": (HEALTHY, {"memory": 3 * GIB // 2}, "memory", "warning", "1.5 GiB available"),
    "an old torch": (HEALTHY, {"versions": {**VERSIONS, "torch": "2.9.1"}}, "packages", "error", "found: 2.9.1"),
    "a missing package": (HEALTHY, {"versions": {"torch": "2.13.0"}}, "packages", "error", "found: none"),
    "no installation": (HEALTHY, {"versions": {}}, "packages", "warning", "with pip"),
    "ports in use": (HEALTHY, {"used": (8000, 8002)}, "ports", "warning", "8000, 8002"),
    "a run directory that others can read": (
        HEALTHY, {"run_dir": OPEN_RUN_DIR}, "run directory", "error", "chmod 700",
    ),
    "a run directory on a full disk": (
        HEALTHY, {"run_dir": FULL_DISK}, "run directory", "error", "TIDEWHEEL_RUN_DIR",
    ),
    "a container with one core": (
        HEALTHY, {"cpu_limit": "50000 100000"}, "cores", "warning", "of which the container may use 0.5",
    ),
    "few files": (HEALTHY, {"descriptors": 128}, "open files", "warning", "ulimit -Hn"),
    "one core": (HEALTHY, {"cores": 1}, "cores", "warning", "take turns"),
    "an old Python": (HEALTHY, {"python": "3.10.1"}, "system", "error", "3.11 to 3.13"),
    "another system": (HEALTHY, {"system": "Darwin"}, "system", "error", "use Linux"),
    "another processor": (HEALTHY, {"processor": "aarch64"}, "system", "warning", "x86_64"),
}  # fmt: skip

Judge = Callable[[Facts], list[Judgement]]


def giving(found: Any) -> Callable[..., Any]:
    def look(*_: object) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    return look


@pytest.fixture
def judge_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Judge]:
    """Judge this machine with planted facts."""

    def judged(facts: Facts) -> list[Judgement]:
        (tmp_path / "driver").write_text(DRIVER.format(facts["driver"]) if facts["driver"] else "")
        (tmp_path / "cpu.max").write_text(facts["cpu_limit"])
        if facts["has_headers"]:
            (tmp_path / "Python.h").touch()
        versions = facts["versions"]
        names = {
            "platform.system": giving(facts["system"]),
            "platform.machine": giving(facts["processor"]),
            "platform.python_version": giving(facts["python"]),
            "platform.python_version_tuple": giving(facts["python"].split(".")),
            "metadata.requires": giving(["torch<2.14,>=2.11", "numpy>=1.26"] if versions else None),
            "_version": lambda name: versions.get(name, ""),
            "tritonserver.locate": giving(facts["server"]),
            "tritonserver.environment": giving({}),
            "tritonserver.known_flags": giving(set()),
            "torch.version.cuda": facts["cuda"],
            "DRIVER_VERSION": tmp_path / "driver",
            "cuda_obstacle": giving("torch cannot use a GPU"),
            "find_compiler": giving(facts["compiler"]),
            "sysconfig.get_path": giving(str(tmp_path)),
            "shutil.disk_usage": giving(disk_usage(facts["space"])),
            "os.access": giving(facts["is_writable"]),
            "available_host_bytes": giving(facts["memory"]),
            "os.sched_getaffinity": giving(set(range(facts["cores"]))),
            "CPU_LIMIT": tmp_path / "cpu.max",
            "raise_descriptor_limit": giving(facts["descriptors"]),
            "_is_used": lambda port: port in facts["used"],
            "run_dir": giving(facts["run_dir"] or tmp_path),
        }
        for name, value in names.items():
            monkeypatch.setattr(f"tidewheel.cli.machine_checks.{name}", value)
        return judge(None, facts["gpus"])

    yield judged
    monkeypatch.undo()


def disk_usage(space: tuple[int, int] | None) -> Any:
    return FileNotFoundError() if space is None else SimpleNamespace(total=space[0], free=space[1])


@pytest.mark.parametrize("facts", [HEALTHY, WITH_GPU], ids=["with a CPU", "with a GPU"])
def test_a_healthy_machine(judge_with: Judge, facts: Facts) -> None:
    findings = judge_with(facts)
    assert {one.verdict for one in findings} == {"ok"}
    assert not any(one.advice for one in findings)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named_alone_and_says_what_to_do(judge_with: Judge, defect: str) -> None:
    machine, planted, subject, verdict, said = DEFECTS[defect]
    (found,) = (one for one in judge_with({**machine, **planted}) if one.verdict != "ok")
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


def installation(root: Path, python: str) -> Path:
    for part in ("bin/tritonserver", "backends/python/libtriton_python.so", f"backends/python/{STUB_NAME}"):
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        (root / part).write_bytes(b"\x7fELF\0libpython%s.so.1.0\0" % python.encode())
        (root / part).chmod(0o755)
    return root / "bin" / "tritonserver"


def test_a_stub_for_another_python_on_this_machine(tmp_path: Path) -> None:
    assert "is built for Python 3.9" in said(check_server(str(installation(tmp_path, "3.9"))))


def test_a_server_that_does_not_run_on_this_machine(tmp_path: Path) -> None:
    binary = installation(tmp_path, f"{sys.version_info.major}.{sys.version_info.minor}")
    assert "does not run (" in said(check_server(str(binary)))


def said(result: CheckResult) -> str:
    verdict, seen, _ = result
    assert verdict == "error"
    return seen


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
