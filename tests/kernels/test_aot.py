"""Compiles the kernels for GPUs that are not there, in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tidewheel_kernels
from tidewheel_kernels.aot import ARCHITECTURES
from tidewheel_kernels.aot_cases import CASES

DEFAULT = [case.name for case in CASES if case.default]
OTHERS = [case.name for case in CASES if not case.default]
SOURCES = str(Path(tidewheel_kernels.__file__).parents[1])
SPLIT_LAUNCHES = 2  # the kernel and the merge


def compile_cases(names: list[str]) -> tuple[int, list[dict[str, Any]], str]:
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "tidewheel_kernels.aot", "--json", "--case", *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, [json.loads(line) for line in result.stdout.splitlines()], result.stderr


def check(names: list[str]) -> None:
    status, reports, errors = compile_cases(names)
    problems = [f"{r['case']} {r['kernel']} sm_{r['arch']}: {r['problem']}" for r in reports if r["problem"]]
    assert not problems and status == 0, "\n".join([*problems, errors])
    assert {(r["case"], r["arch"]) for r in reports} == {(name, arch) for name in names for arch in ARCHITECTURES}
    assert all(r["registers"] > 0 for r in reports)


def test_kernels_compile_and_do_not_spill() -> None:
    check(DEFAULT)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_compile(name: str) -> None:
    check([name])


def test_a_split_decode_is_two_kernels() -> None:
    _, reports, _ = compile_cases(["decode-128-split"])
    assert len(reports) == SPLIT_LAUNCHES * len(ARCHITECTURES)


def test_every_kernel_is_compiled_by_default() -> None:
    _, reports, _ = compile_cases(DEFAULT)
    folder = Path(tidewheel_kernels.__file__).parent / "jit"
    defined = {
        line.removeprefix("def ").split("(")[0]
        for file in folder.glob("*.py")
        for line in file.read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    assert {report["kernel"] for report in reports} == defined


def test_the_interpreter_is_refused() -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": SOURCES,
    }
    command = [sys.executable, "-m", "tidewheel_kernels.aot", "--case", "kv_cache"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "TRITON_INTERPRET unset" in result.stderr
