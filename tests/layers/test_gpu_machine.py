"""What the GPU recipe starts, with nothing importable but what its machine has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpu.device_tests import CONFIGURATION, ROOT, files_to_run
from gpu.machine_check import IMPORTED
from gpu.pack import WHEELS
from gpu.smoke import TESTS
from gpu.suite import FIRST

MACHINE = WHEELS.with_name("machine.txt")
FOLDERS = ("benchmarks", "backend", "kernels", "client", "process", "queue", "tests", "tests/support/gpu")
ABSENT = ("hypothesis", "jsonschema", "tritonclient", "locust", "pytest_timeout", "ray", "redis")


def on_the_machine(*arguments: str, more: Sequence[Path] = ()) -> str:
    """Run Python there, with distributions of `more` files; return its output, or fail with it."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in FOLDERS),
        "BARE_MACHINE": os.pathsep.join(map(str, (MACHINE, WHEELS, *more))), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TRITON_INTERPRET": "1",
    }  # fmt: skip
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_other_packages_are_absent() -> None:
    found = f"[name for name in {ABSENT} if find_spec(name)]"
    on_the_machine("-c", f"from importlib.util import find_spec; found = {found}; assert not found, found")


def test_all_stages_and_the_engine_are_imported() -> None:
    modules = [*IMPORTED, "gpu.__main__", *(f"gpu.{plan.name}" for plan in FIRST)]
    on_the_machine("-c", f"import {', '.join(modules)}")


def test_the_stage_with_a_server_is_imported() -> None:
    modules = "gpu.triton_tax, tidewheel.cli.serve, tidewheel_client.server_pages"
    on_the_machine("-c", f"import {modules}", more=[WHEELS.with_name("wheels_server.txt")])


@pytest.mark.parametrize("file", ["Makefile", "benchmarks/gpu/README.md", "benchmarks/gpu/pack.py"])
def test_every_package_is_on_the_path_of_the_recipe(file: str) -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["where"]
    paths = [line for line in (ROOT / file).read_text().splitlines() if "PYTHONPATH=" in line and "backend" in line]
    assert paths and all({"benchmarks", *packages} <= set(re.findall(r"\w+", path)) for path in paths)


def files_with_tests() -> set[Path]:
    return {TESTS, *(path for paths in files_to_run(is_dry=False).values() for path in paths)}


def test_every_test_that_needs_a_device_is_run() -> None:
    others = set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)}
    marked = {path for path in others if "pytest.mark.gpu" in path.read_text()}
    assert len(marked) > 5 and marked <= files_with_tests()


def test_all_tests_are_collected() -> None:
    files = sorted(map(str, files_with_tests()))
    options = ("-c", str(CONFIGURATION), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "gpu.line_reports")
    found = on_the_machine("-m", "pytest", "-q", "--collect-only", *options, *files)
    assert "test_decode_graphs_gpu.py::test_every_size_has_its_graph" in found
    assert f"{Path(TESTS).name}::test_prompt_attention" in found
