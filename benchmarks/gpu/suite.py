"""Stages by importance, each in its own process with a share of the time, and the options that all have.

Records of a stage come through a pipe, and its output goes to the terminal and the log: neither a stage that dies
nor a full disk loses what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

NO_DEVICE, INTERRUPTED = 2, 130  # exit status
TINY = "tiny"
TIMELINES = "timelines.json.gz"  # of `profile`
MODEL_NAMES = ("qwen3-0.6b", "llama-3.1-8b")
# Folders of a bundle of other engines (README.md).
FA3_FOLDER = "site-shim"  # flash_attn_interface over the library below
FA3_LIBRARY = "site-vllm/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
END_S = 4.0  # of a stage's share, for its end
POLL_S = 0.1
FREE_BYTES = 3 << 30  # device memory in use when idle
FREE_WAIT_S = 10.0
DONE, STOPPED = "done", "stopped"
MAX_LINE = 300


class StagePlan(NamedTuple):
    """`seconds` is the share of the time: more if others leave some; a stage needs half of it to start."""

    name: str
    seconds: float
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


class Fallback(NamedTuple):
    """Another way to run the engine, tried where it fails."""

    name: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


FIRST = (  # a device for the first time: is all right, and how far are the goals
    StagePlan("machine_check", 18.0),
    StagePlan("smoke", 35.0),
    StagePlan("device_tests", 80.0),
    StagePlan("ceilings", 20.0),
    StagePlan("parity", 45.0, ("--dtypes", "bfloat16")),  # compiles what an engine needs, first of all stages
    StagePlan("latency", 85.0, ("--goals",)),
    StagePlan("engine", 80.0, ("--once",)),
    StagePlan("profile", 45.0),
    StagePlan("kernels", 40.0, ("--goals",)),
)
WHOLE = (
    StagePlan("device_tests", 100.0),
    StagePlan("parity", 60.0),
    StagePlan("engine", 150.0),
    StagePlan("kernels", 110.0),
    StagePlan("latency", 80.0),
    StagePlan("triton_tax", 100.0),
    StagePlan("profile", 60.0),
    StagePlan("swap", 50.0),
    StagePlan("drafts", 80.0),
)
PEERS = StagePlan("peers", 420.0)
SWEEP = StagePlan("kernels", 480.0, ("--sweep",))
CEILINGS = StagePlan("ceilings", 40.0)
BESIDE = (CEILINGS, StagePlan("kernels", 100.0), PEERS)  # with a bundle of peers
SWITCHES = {  # what is off until a device has measured it
    name: StagePlan("latency", 85.0, ("--goals",), environment)
    for name, environment in (
        ("dependent_launch", {"TIDEWHEEL_TRY": "dependent_launch"}),
        ("flash_prompts", {"TIDEWHEEL_TRY": "flash_prompts"}),
        ("cublaslt", {"TORCH_BLAS_PREFER_CUBLASLT": "1"}),
    )
}
ALONE = {plan.name: plan for plan in (*FIRST, *WHOLE)} | {"peers": PEERS, "sweep": SWEEP} | SWITCHES
NAMES = tuple(ALONE)
PROBE = "parity"  # the first stage that runs the engine
AGAIN = Fallback("a second try, with the kernels that the first compiled")  # where time ended it
FALLBACKS = (
    Fallback("without CUDA graphs", ("--eager",)),
    Fallback("through triton-lang's own launcher", (), {"TIDEWHEEL_LAUNCH": "triton"}),
    Fallback("with reference kernels", ("--eager",), {"TIDEWHEEL_KERNELS": "reference"}),
)


def add_common_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run of the programs")
    made.add_argument(
        "--shape", choices=["real", "tiny"], help="tiny: small sizes and few samples; default on cpu, real on cuda"
    )
    made.add_argument("--eager", action="store_true", help="without CUDA graphs")
    made.add_argument("--models", default="", help=f"comma-separated; default: {', '.join(MODEL_NAMES)}")
    made.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for results (default: %(default)s)")


def is_dry(options: argparse.Namespace) -> bool:
    return (options.shape or ("tiny" if options.device == "cpu" else "real")) == "tiny"


def model_names(options: argparse.Namespace) -> list[str]:
    wanted = [name for name in options.models.split(",") if name]
    if unknown := [name for name in wanted if name not in (*MODEL_NAMES, TINY)]:
        raise SystemExit(f"--models {','.join(unknown)}: choose from {', '.join(MODEL_NAMES)}, {TINY}")
    return wanted or ([TINY] if is_dry(options) else list(MODEL_NAMES))


def device_problem(device: str) -> str | None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device is seen by torch: nothing is measured (--device cpu tries the programs)"
    return None


def unpacked(bundle: Path, folder: Path) -> Path:
    """Unpack a bundle of other engines, unless it is a folder."""
    if bundle.is_dir():
        return bundle
    folder.mkdir(parents=True)
    with tarfile.open(bundle) as archive:
        archive.extractall(folder, filter="data")
    return folder


def choose(names: Sequence[str], *, with_peers: bool) -> list[StagePlan]:
    """Return plans, with ceilings first for percentages if any are named; raise ValueError for an unknown name."""
    if unknown := [name for name in names if name not in ALONE]:
        raise ValueError(f"--stages {','.join(unknown)}: choose from {', '.join(NAMES)}")
    if not names:
        return list(BESIDE if with_peers else FIRST)
    plans = {name: ALONE[name] for name in names if name != "ceilings"}
    if "triton_tax" in plans and "engine" not in plans:  # which measures equal requests in-process
        plans["triton_tax"] = plans["triton_tax"]._replace(arguments=("--in-process",))
    return [CEILINGS, *plans.values()]


@dataclass
class Findings:
    records: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)  # name, seconds, outcome
    helped: str = ""  # the fallback with which the engine ran

    @property
    def any_stage_failed(self) -> bool:
        return any(stage["outcome"].startswith(("FAILED", STOPPED)) for stage in self.stages)

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["type"] == kind]


class Suite:
    def __init__(
        self,
        plans: Sequence[StagePlan],
        common: Sequence[str],
        folder: Path,
        seconds: float,
        *,
        bundle: Path | None = None,
        log: IO[str] | None = None,
    ) -> None:
        self.findings = Findings()
        self._plans = plans
        self._common = list(common)
        self._folder = folder
        self._end = time.monotonic() + seconds
        self._ceilings = folder / "ceilings.json"
        self._bundle = bundle
        self._log = log
        self._fallback = Fallback("")

    def run(self, save: Callable[[Findings], None]) -> None:
        """Run the stages, with `save` after each and on Ctrl-C."""
        try:
            for number, plan in enumerate(self._plans):
                self._run_plan(plan, sum(later.seconds for later in self._plans[number + 1 :]))
                save(self.findings)
        except KeyboardInterrupt:
            save(self.findings)
            raise

    def _run_plan(self, plan: StagePlan, later_s: float) -> None:
        left = self._end - time.monotonic()
        if left < 0.5 * min(plan.seconds, 120.0):
            reason = f"{max(left, 0.0):.0f} s are left, and it takes up to {plan.seconds:.0f}"
            self._note(plan.name, 0.0, f"skipped: {reason}")
            return
        seconds = max(min(plan.seconds, left), left - later_s)
        if not self._run_stage(plan, self._fallback, seconds) and plan.name == PROBE:
            self._try_fallbacks(plan, later_s)

    def _try_fallbacks(self, plan: StagePlan, later_s: float) -> None:
        """Look for a way in which the engine runs, and keep to it."""
        was_stopped = self.findings.stages[-1]["outcome"].startswith(STOPPED)
        ways = (AGAIN, *FALLBACKS) if was_stopped else FALLBACKS
        for number, fallback in enumerate(ways):
            left = self._end - time.monotonic()
            seconds = max(plan.seconds, (left - later_s) / (len(ways) - number))
            if left > plan.seconds and self._run_stage(plan, fallback, seconds):
                self.findings.helped = fallback.name
                self._fallback = self._fallback if fallback is AGAIN else fallback
                return
        self.findings.helped = "none of " + ", ".join(fallback.name for fallback in FALLBACKS)

    def _run_stage(self, plan: StagePlan, fallback: Fallback, seconds: float) -> bool:
        """Return whether the stage ended well and no part of it failed."""
        switches = (f"{name}={value}" for name, value in plan.environment.items())
        label = " ".join(filter(None, (plan.name, *plan.arguments, *switches, fallback.name)))
        print(f"{label}: at most {seconds:.0f} s", flush=True)
        start, before, outcome = time.monotonic(), len(self.findings.of_type("failed")), "interrupted"
        wait_for_free_memory()
        seconds -= time.monotonic() - start
        process = StageProcess(self._command(plan, fallback, seconds), self._environment(plan, fallback), self._log)
        try:
            outcome = process.wait(seconds - END_S)
        finally:
            process.end()
            self.findings.records += process.records
            self._note(label, time.monotonic() - start, outcome)
        return outcome == DONE and len(self.findings.of_type("failed")) == before

    def _command(self, plan: StagePlan, fallback: Fallback, seconds: float) -> list[str]:
        command = [
            sys.executable,
            "-P",
            "-m",
            f"gpu.{plan.name}",
            *self._common,
            *plan.arguments,
            *fallback.arguments,
        ]
        command += ["--seconds", f"{seconds - 2 * END_S:.1f}"]
        if plan.name == "ceilings":
            command += ["--ceilings-out", str(self._ceilings)]
        elif self._ceilings.exists():
            command += ["--ceilings", str(self._ceilings)]
        if plan.name == "peers" and self._bundle is not None:
            command += ["--peers", str(self._bundle)]
        return command

    def _environment(self, plan: StagePlan, fallback: Fallback) -> dict[str, str]:
        """Show a bundle's FlashAttention-3 only to the kernels stage."""
        environment = {**os.environ, **plan.environment, **fallback.environment, "PYTHONUNBUFFERED": "1"}
        if plan.name == "kernels" and self._bundle is not None:
            paths = (environment.get("PYTHONPATH", ""), str(self._bundle / FA3_FOLDER))
            environment |= {"PYTHONPATH": os.pathsep.join(paths), "FA3_SO": str(self._bundle / FA3_LIBRARY)}
        return environment

    def _note(self, label: str, seconds: float, outcome: str) -> None:
        print(f"  {label}: {outcome} ({seconds:.1f} s)" if seconds else f"  {label}: {outcome}", flush=True)
        self.findings.stages.append({"name": label, "seconds": round(seconds, 1), "outcome": outcome})


class StageProcess:
    """Process group of a stage, with its records so far and its last line."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: IO[str] | None) -> None:
        self.records: list[dict[str, Any]] = []
        self._last_line = ""
        self._log = log
        read_end, write_end = os.pipe()
        self._process = subprocess.Popen(
            [*command, "--records", f"/dev/fd/{write_end}"], env=environment, start_new_session=True,
            pass_fds=[write_end], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        os.close(write_end)
        assert self._process.stdout is not None
        readers = ((self._read_output, self._process.stdout), (self._read_records, os.fdopen(read_end)))
        self._readers = [threading.Thread(target=read, args=(pipe,), daemon=True) for read, pipe in readers]
        for reader in self._readers:
            reader.start()

    def wait(self, seconds: float) -> str:
        """Return the outcome in a line."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"{STOPPED}: it did not end within {seconds:.0f} s; last: {self._last_line}"
        if status == 0:
            return DONE
        self._join()
        cause = f"status {status}" if status > 0 else signal.Signals(-status).name
        return f"FAILED with {cause}: {self._last_line}"

    def end(self) -> None:
        """End the group: with Ctrl-C, then at once."""
        if self._process.poll() is None:
            self._signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._join()

    def _join(self) -> None:
        for reader in self._readers:
            reader.join(END_S)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read_output(self, lines: Iterable[str]) -> None:
        for line in lines:
            sys.stdout.write(line)
            sys.stdout.flush()
            self._last_line = line.strip()[:MAX_LINE] or self._last_line
            with contextlib.suppress(OSError, ValueError):  # a full disk
                if self._log is not None:
                    self._log.write(line)
                    self._log.flush()

    def _read_records(self, lines: Iterable[str]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError):  # cut short
                self.records.append(json.loads(line))


def memory_in_use() -> int | None:
    """Return bytes in use on the first device; None if unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return int(done.stdout.splitlines()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def wait_for_free_memory() -> None:
    """Wait for engine processes, which outlive their server."""
    end = time.monotonic() + FREE_WAIT_S
    while time.monotonic() < end:
        used = memory_in_use()
        if used is None or used < FREE_BYTES:
            return
        time.sleep(POLL_S)
    print(f"  {memory_in_use()} bytes of device memory are still in use by somebody", flush=True)
