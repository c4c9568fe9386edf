"""Stages by importance, each in its own process with a share of the time, and the options that all have."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

NO_DEVICE, INTERRUPTED = 2, 130  # exit status
TINY = "tiny"
MODEL_NAMES = ("qwen3-0.6b", "llama-3.1-8b")
# Folders of a bundle of other engines (README.md).
FA3_FOLDER = "site-shim"  # flash_attn_interface over the library below
FA3_LIBRARY = "site-vllm/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
END_S = 20.0
POLL_S = 0.1
FREE_BYTES = 3 << 30  # device memory in use when idle
FREE_WAIT_S = 20.0


class StagePlan(NamedTuple):
    """`seconds` is the largest share; a stage needs half of it to start."""

    name: str
    seconds: float
    arguments: tuple[str, ...] = ()


DEFAULT = (
    StagePlan("ceilings", 40.0),
    StagePlan("correctness", 100.0),
    StagePlan("engine", 150.0),
    StagePlan("kernels", 110.0),
    StagePlan("latency", 80.0),
    StagePlan("triton_tax", 100.0),
    StagePlan("idle", 50.0),
    StagePlan("swap", 50.0),
)
PEERS = StagePlan("peers", 420.0)
BESIDE = (StagePlan("ceilings", 40.0), StagePlan("kernels", 100.0), PEERS)  # with a bundle of peers
SWEEP = StagePlan("kernels", 480.0, ("--sweep",))
NAMES = (*(plan.name for plan in DEFAULT), "peers", "sweep")


def add_common_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run of the programs")
    made.add_argument(
        "--shape", choices=["real", "tiny"], help="tiny: small sizes and few samples; default on cpu, real on cuda"
    )
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
    """Return plans, ceilings first for percentages; raise ValueError for an unknown name."""
    known = {plan.name: plan for plan in DEFAULT} | {"peers": PEERS, "sweep": SWEEP}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--stages {','.join(unknown)}: choose from {', '.join(NAMES)}")
    if names:
        if "engine" not in names:  # measures equal requests in-process
            known["triton_tax"] = known["triton_tax"]._replace(arguments=("--in-process",))
        return [known["ceilings"], *(known[name] for name in names if name != "ceilings")]
    return list(BESIDE if with_peers else DEFAULT)


@dataclass
class Findings:
    records: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)  # name, seconds, outcome

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["type"] == kind]


class Suite:
    def __init__(
        self,
        plans: Sequence[StagePlan],
        common: Sequence[str],
        folder: Path,
        seconds: float,
        bundle: Path | None = None,
    ) -> None:
        self.findings = Findings()
        self._plans = plans
        self._common = list(common)
        self._folder = folder
        self._end = time.monotonic() + seconds
        self._ceilings = folder / "ceilings.json"
        self._bundle = bundle

    def run(self, save: Callable[[Findings], None]) -> None:
        """Run the stages, with `save` after each and on Ctrl-C."""
        for number, plan in enumerate(self._plans):
            left = self._end - time.monotonic()
            label = plan.name + "".join(f" {argument}" for argument in plan.arguments)
            if left < 0.5 * min(plan.seconds, 120.0):
                reason = f"{max(left, 0.0):.0f} s are left, and it takes up to {plan.seconds:.0f}"
                self._note(label, 0.0, f"skipped: {reason}")
                continue
            print(f"[{number + 1}/{len(self._plans)}] {label}: at most {min(plan.seconds, left):.0f} s", flush=True)
            try:
                self._run_stage(plan, label, min(plan.seconds, left))
            except KeyboardInterrupt:
                self._note(label, 0.0, "interrupted")
                save(self.findings)
                raise
            save(self.findings)

    def _run_stage(self, plan: StagePlan, label: str, seconds: float) -> None:
        records = self._folder / "records.jsonl"
        records.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", f"gpu.{plan.name}", *self._common, *plan.arguments]
        command += ["--records", str(records), "--seconds", f"{seconds:.1f}"]
        if plan.name == "ceilings":
            command += ["--ceilings-out", str(self._ceilings)]
        elif self._ceilings.exists():
            command += ["--ceilings", str(self._ceilings)]
        if plan.name == "peers" and self._bundle is not None:
            command += ["--peers", str(self._bundle)]
        start, outcome = time.monotonic(), "interrupted"
        try:
            with _process(command, self._environment(plan)) as process:
                outcome = _wait(process, seconds + END_S)
        finally:
            self.findings.records += read_records(records)
            if outcome != "interrupted":
                self._note(label, time.monotonic() - start, outcome)
            wait_for_free_memory()

    def _environment(self, plan: StagePlan) -> dict[str, str]:
        """Show a bundle's FlashAttention-3 only to the kernels stage."""
        environment = dict(os.environ)
        if plan.name == "kernels" and self._bundle is not None:
            paths = (environment.get("PYTHONPATH", ""), str(self._bundle / FA3_FOLDER))
            environment |= {"PYTHONPATH": os.pathsep.join(paths), "FA3_SO": str(self._bundle / FA3_LIBRARY)}
        return environment

    def _note(self, label: str, seconds: float, outcome: str) -> None:
        print(f"  {label}: {outcome} ({seconds:.1f} s)" if seconds else f"  {label}: {outcome}", flush=True)
        self.findings.stages.append({"name": label, "seconds": round(seconds, 1), "outcome": outcome})


@contextlib.contextmanager
def _process(command: Sequence[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run in a process group, and end all of it."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            _signal(process, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped: it ran over its time by {END_S:.0f} s"
    return "done" if status == 0 else f"FAILED with status {status}"


def read_records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


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
