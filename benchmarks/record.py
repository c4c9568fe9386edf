"""Provenance of results: machine, versions, commit, command."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tidewheel.bench.environment import command_line, commit, processor

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def environment(*packages: str) -> dict[str, Any]:
    return {
        "commit": commit(),
        "command": command_line("python", sys.argv),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "gpu": None},
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}},
    }


def summary(samples: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(samples), "samples": samples}


def save(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
