"""Common parts of stages: options, time left, and results.

A stage is a process, so its end frees its memory and a device error ends only it. `--records` writes each result at
once, so nothing is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from gpu import STARTED
from gpu.measurements import OURS, Ceilings, Measurement
from gpu.suite import INTERRUPTED, NO_DEVICE, add_common_options, device_problem, is_dry, model_names
from tidewheel.bench.worker_process import WorkerFailed

SWITCHES = ("TIDEWHEEL_TRY", "TORCH_BLAS_PREFER_CUBLASLT")


class OutOfTime(Exception):
    """No time is left for the stage; the rest is skipped."""


@dataclass
class Stage:
    name: str
    device: torch.device
    models: list[str]
    is_dry: bool  # tiny sizes: proves the program, measures nothing
    end: float  # time.monotonic
    ceilings: Ceilings
    out: Path  # beside the results
    records: TextIO | None
    options: argparse.Namespace

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def result(self, measurement: Measurement) -> None:
        if measurement.who == OURS and (switches := [os.environ[name] for name in SWITCHES if os.environ.get(name)]):
            measurement = replace(measurement, who=f"{OURS}, {' '.join(switches)}")
        print(f"  {measurement.line()}", flush=True)
        self._write(measurement.to_json())

    def skip(self, what: str, reason: str) -> None:
        print(f"  {what}: skipped: {reason}", flush=True)
        self._write({"type": "skipped", "what": what, "reason": reason})

    def facts(self, **facts: Any) -> None:
        self._write({"type": "facts", **facts})

    @contextlib.contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Record an error, or `check_time`'s refusal, and go on."""
        try:
            yield
        except OutOfTime as late:
            self.skip(what, str(late))
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"  {what}: FAILED: {message[:300]}", flush=True)
            self._write({"type": "failed", "what": what, "error": message, "traceback": traceback.format_exc()})
            if is_device_lost(error):
                raise

    def check_time(self, needs_s: float) -> None:
        """Raise `OutOfTime` if less time is left; a dry run goes on."""
        if self.seconds_left < needs_s and not self.is_dry:
            raise OutOfTime(f"{max(0.0, self.seconds_left):.0f} s are left and it needs about {needs_s:.0f}")

    def clocked(self, call: Callable[[], object]) -> float:
        """Return the call's seconds by the host's clock, device synchronised."""
        self._synchronise()
        start = time.perf_counter()
        call()
        self._synchronise()
        return time.perf_counter() - start

    def _synchronise(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def _write(self, record: dict[str, Any]) -> None:
        if self.records is not None:
            self.records.write(json.dumps({"stage": self.name, **record}) + "\n")
            self.records.flush()


def is_device_lost(error: Exception) -> bool:
    """Return whether every later call in the process fails too."""
    text = str(error).lower()
    fatal = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
    return any(words in text for words in fatal)


@contextlib.contextmanager
def logged(log: Path) -> Iterator[Path]:
    """Add the log's last lines to a worker's failure."""
    try:
        yield log
    except WorkerFailed as error:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
        raise RuntimeError(f"{error}: {' | '.join(last)[-600:]}") from error


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(made)
    made.add_argument("--records", type=Path, help="append every result to this file, a line of JSON each")
    made.add_argument("--ceilings", type=Path, help="a file written by gpu.ceilings; default: those of an H200")
    made.add_argument("--seconds", type=float, default=600.0, help="parts that do not fit are skipped")
    return made


def run(name: str, body: Callable[[Stage], None], options: argparse.Namespace) -> None:
    problem = device_problem(options.device)
    if problem:
        print(f"gpu.{name}: {problem}", file=sys.stderr)
        raise SystemExit(NO_DEVICE)
    options.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stage = Stage(
            name=name,
            device=torch.device(options.device),
            models=model_names(options),
            is_dry=is_dry(options),
            end=STARTED + options.seconds,
            ceilings=Ceilings.load(options.ceilings) if options.ceilings else Ceilings(),
            out=options.out,
            records=stack.enter_context(options.records.open("a")) if options.records else None,
            options=options,
        )
        stage.facts(ceilings=asdict(stage.ceilings), are_measured=options.ceilings is not None, models=stage.models)
        try:
            with stage.part(name):
                body(stage)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
    sys.stdout.flush()
    sys.stderr.flush()
    if stage.is_cuda:
        os._exit(0)  # device shutdown would cost seconds
