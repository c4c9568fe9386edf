"""Versions, imports and tools, so that what is missing is named before time is spent."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path

from gpu.measurements import Measurement
from gpu.stage import Stage, parser, run

# The engine imports its runner, the runner transformers, when they are first needed.
IMPORTED = ("tidewheel.llm", "tidewheel.runner.model_runner", "transformers", "triton", "pytest")


def body(stage: Stage) -> None:
    stage.facts(python=platform.python_version(), **tools())
    for name in IMPORTED:
        with stage.part(f"import of {name}"):
            start = time.perf_counter()
            importlib.import_module(name)
            seconds = time.perf_counter() - start
            stage.result(Measurement(name="import", case=name, value=seconds, unit="s", samples=[seconds]))
    if stage.is_cuda:
        with stage.part("what triton-lang compiles with"):
            lacking = [name for name, found in tools().items() if not found]
            if lacking:
                raise RuntimeError(
                    f"{', '.join(lacking)}: not found; kernels need a C compiler, Python.h and the driver"
                )


def tools() -> dict[str, str]:
    """Return where triton-lang's compiler, headers and driver are; empty texts for what is missing."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return {
        "gcc": shutil.which("gcc") or shutil.which("cc") or "",
        "Python.h": str(header) if header.exists() else "",
        "libcuda": libcuda(),
        "nvidia-smi": output("nvidia-smi", "-L").strip(),
    }


def libcuda() -> str:
    """Return the folders where triton-lang finds libcuda: TRITON_LIBCUDA_PATH, the loader's, or LD_LIBRARY_PATH."""
    try:
        from triton.backends.nvidia.driver import libcuda_dirs

        return ", ".join(libcuda_dirs())
    except (ImportError, AssertionError, OSError, subprocess.SubprocessError):
        return ""


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


if __name__ == "__main__":
    run("machine_check", body, parser(__doc__).parse_args())
