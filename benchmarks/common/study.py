"""Command line, turns, tables and records that the studies share."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tidewheel.bench.environment import command_line, environment

ROOT = Path(__file__).parents[2]
RESULTS, BUILD = ROOT / "benchmarks" / "results", ROOT / "build"
T = TypeVar("T")


class Study(argparse.ArgumentParser):
    """Options of a study. `--save` writes benchmarks/results/NAME.json, with the versions of `packages`."""

    def __init__(self, name: str, description: str | None, *packages: str) -> None:
        super().__init__(
            prog=f"benchmarks {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._name = name
        self._packages = packages
        self.add_argument("--save", action="store_true", help=f"write benchmarks/results/{name}.json")

    def begin(self) -> argparse.Namespace:
        """Read the options; note machine, versions and commit."""
        self._options = self.parse_args()
        BUILD.mkdir(exist_ok=True)
        self.facts = {
            **environment(self._packages),
            "command": command_line("python benchmarks", [Path(sys.argv[0]).stem, *sys.argv[1:]]),
        }
        return self._options

    def save(self, result: Mapping[str, Any], name: str = "") -> None:
        """Write the result with its facts, if `--save` is given: floats to four digits, nothing named `samples`."""
        if self._options.save:
            path = RESULTS / f"{name or self._name}.json"
            path.write_text(json.dumps(summarised({**self.facts, **result}), separators=(",", ":")) + "\n")
            print(path)


def summarised(value: Any) -> Any:
    """Return a JSON value with floats of four digits, and without the fields named `samples`."""
    if isinstance(value, Mapping):
        return {key: summarised(item) for key, item in value.items() if key != "samples"}
    if isinstance(value, list | tuple):
        return [summarised(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def in_turns(
    runs: Mapping[str, Callable[[], T]],
    repeats: int,
    *,
    warm_up: int = 1,
    note: Callable[[int, str, T], None] = lambda _number, _name, _result: None,
) -> dict[str, list[T]]:
    """Run all in turn, each second round backwards, so that drift hits all; return results after the warm-up."""
    results: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(1 - warm_up, repeats + 1):
        for name in runs if number % 2 else reversed(runs):
            result = runs[name]()
            if number > 0:
                results[name].append(result)
                note(number, name, result)
    return results


def run_in(checkout: Path, command: Sequence[str]) -> Any:
    """Run `python benchmarks COMMAND` with the packages of another checkout, and return the JSON that it prints."""
    folders = [checkout / name for name in ("backend", "kernels", "client", "process", "queue")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks"), *command], env=variables, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"the run in {checkout} failed")
    return json.loads(done.stdout)


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def summary(samples: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(samples), "range": [min(samples), max(samples)], "samples": samples}


def show(rows: Iterable[Mapping[str, object]]) -> None:
    from tidewheel.bench.tables import TextTable  # absent in older checkouts

    shown = [{name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in row.items()}
             for row in rows]  # fmt: skip
    print(TextTable(list(shown[0]), [list(row.values()) for row in shown]).as_text(), flush=True)
