from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import Progress, no_progress
from tidewheel.models.model_folder import one_line
from tidewheel.private_dir import run_dir
from tidewheel_kernels import copy_blocks
from tidewheel_kernels.choice import preferences
from tidewheel_kernels.native.library import cache_folder as native_cache_folder

logger = logging.getLogger(__name__)

TAKEN = ("out of memory", "busy or unavailable")  # CUDA errors of a full device


class CompileLog:
    """Listener that reports kernel compilations of triton-lang while serving."""

    def __init__(self, report: Progress) -> None:
        self._report = report
        self._counts = {"compiled": 0, "loaded": 0}
        self._is_serving = False

    def begin(self, **_: object) -> None:
        self._report("compile", 0.0)

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        what = "loaded" if cache_hit else "compiled"
        self._counts[what] += 1
        if self._is_serving:
            seconds = 1e-6 * times.total
            logger.warning("kernel %s was %s while requests waited: %.2f s", src.name, what, seconds)
            self._report("", 1.0)

    def begin_serving(self) -> None:
        import triton

        triton.knobs.runtime.jit_cache_hook = self.begin
        self._is_serving = True
        logger.info("kernels: %d compiled, %d loaded from the cache", *self._counts.values())


def prepare_kernels(device: torch.device, report: Progress = no_progress) -> CompileLog | None:
    """Try a small kernel and return a listener; None without kernels. Raise `ConfigError`."""
    if device.type != "cuda" or set(preferences().values()) == {"reference"}:
        return None
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("a GPU needs triton-lang, which is not installed: install 'triton', or set device to 'cpu'")
    os.environ["TRITON_CACHE_DIR"] = str(cache_folder(os.environ))
    log = CompileLog(report)
    try:
        import triton

        triton.knobs.compilation.listener = log
        _run_a_kernel(device)
    except Exception as error:
        raise _explained(error, device) from error
    return log


def _run_a_kernel(device: torch.device) -> None:
    first, second = (torch.full((1,), index, dtype=torch.int64, device=device) for index in (0, 1))
    copy_blocks(torch.zeros(1, 2, 16, device=device), first, second)
    torch.cuda.synchronize(device)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return a writable folder for compiled kernels. Raise `ConfigError` if the configured one is read-only."""
    named = environment.get("TRITON_CACHE_DIR")
    if not named and environment.get("TRITON_HOME"):
        named = str(Path(environment["TRITON_HOME"]) / ".triton" / "cache")
    if named:
        if not _can_write(Path(named)):
            raise ConfigError(f"compiled kernels cannot be kept in {named}: set TRITON_CACHE_DIR to another folder")
        return Path(named)
    folder = native_cache_folder(environment)
    return folder if _can_write(folder) else run_dir() / folder.name


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except OSError:
        return False
    return True


def _explained(error: Exception, device: torch.device) -> ConfigError:
    if isinstance(error, subprocess.CalledProcessError):
        return ConfigError(
            f"triton-lang needs a C compiler and Python's headers, but {error.cmd[0]} failed (the log tells why): "
            "install python3-dev, or set CC"
        )
    if "Failed to find C compiler" in str(error) or isinstance(error, FileNotFoundError):
        return ConfigError("triton-lang needs a C compiler, and there is none: install gcc, or set CC")
    name = torch.cuda.get_device_name(device)
    if any(words in str(error) for words in TAKEN):
        return ConfigError(
            f"{name} is held by another program, which nvidia-smi names: stop it, or use another GPU "
            f"({one_line(error, 80)})"
        )
    return ConfigError(f"kernels cannot be compiled for {name}, or run on it: {one_line(error)}")
