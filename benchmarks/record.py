"""What every recorded result says of itself: machine, versions, commit, command."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def commit() -> str:
    """The commit that was measured; "-dirty" when the tree differed from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def environment(*packages: str) -> dict[str, Any]:
    return {
        "commit": commit(),
        "command": " ".join(["python", *sys.argv]),
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
