"""Faults in the stages of the GPU recipe, by `PLANTED`: pairs stage=fault, with commas between."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

CAPTURE = "CUDA error: operation failed due to a previous error during capture"
LOST = "CUDA error: an illegal memory access was encountered"


def plant() -> None:
    stage = sys.orig_argv[sys.orig_argv.index("-m") + 1].removeprefix("gpu.") if "-m" in sys.orig_argv else ""
    faults = dict(pair.split("=") for pair in os.environ["PLANTED"].split(","))
    if stage in faults:
        FAULTS[faults[stage]]()


def hang() -> None:
    """Hang as in a driver that does not answer: Ctrl-C does nothing either."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("waits for the device", flush=True)
    threading.Event().wait()


def break_import() -> None:
    sys.modules["tidewheel.llm"] = None  # type: ignore[assignment]


def refuse_captures() -> None:
    from tidewheel import llm

    load = llm.load_model_runner

    def refusing(config: Any, *arguments: Any, **named: Any) -> Any:
        if not config.enforce_eager:
            raise RuntimeError(CAPTURE)
        return load(config, *arguments, **named)

    llm.load_model_runner = refusing


def lose_device() -> None:
    from gpu.engine_steps import TimedLLM

    def timed(*_: Any) -> NoReturn:
        raise RuntimeError(LOST)

    TimedLLM.timed = timed  # type: ignore[method-assign]


def fill_disk() -> None:
    def write_text(path: Path, *_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    Path.write_text = write_text  # type: ignore[method-assign]


FAULTS = {
    "hangs": hang,
    "import": break_import,
    "capture": refuse_captures,
    "lost": lose_device,
    "disk": fill_disk,
}
