import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tidewheel.bench.peer_engines import installed_versions

SOURCE = Path(__file__).parents[3]
PACKAGES = ("torch", "transformers", "triton", "tritonclient", "nvidia-pytriton", "numpy")


def environment(packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    return {
        "commit": commit(),
        "command": command_line("tidewheel", sys.argv[1:]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "gpu": gpu(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), **installed_versions(*packages)},
    }


def command_line(program: str, arguments: Sequence[str]) -> str:
    return " ".join([program, *map(without_folders, arguments)])


def without_folders(text: str) -> str:
    """Cut absolute paths, also in `option=path`, to their last part."""
    return re.sub(r"(^|=)/(?:[^/=]+/)*", r"\1", text)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def gpu() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return _output(command) or None


def commit() -> str:
    command = ["git", "-C", str(SOURCE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return _output(command) or "unknown"


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
