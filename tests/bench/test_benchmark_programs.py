"""`python benchmarks` finds every program, and the README lists them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS), *arguments], capture_output=True, text=True, check=False)


def listed() -> list[str]:
    return [line.split()[1] for line in run().stdout.splitlines()]


def test_the_readme_lists_every_program() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")] == listed()


def test_a_program_is_run_by_its_name() -> None:
    done = run("scheduler_cost", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: benchmarks scheduler_cost")


@pytest.mark.parametrize("name", ["no_such_program", "study", "../setup"])
def test_another_name_is_refused(name: str) -> None:
    done = run(name)
    assert done.returncode == 1
    assert done.stderr == f"benchmarks: no program {name!r}; `python benchmarks` lists them\n"
