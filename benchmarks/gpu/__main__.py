"""Show in eight minutes whether all is right on a GPU, and how fast it is.

    make bench-gpu                                correctness, and the figures that have goals
    make bench-gpu PEERS=peers.tar.xz             kernels and engines of others beside ours
    python -m gpu --stages engine,kernels         stages at full length
    python -m gpu --device cpu                    a dry run of the programs, which measures nothing

Each stage is also a program: python -m gpu.kernels --help. benchmarks/gpu/README.md says what a machine needs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import json
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from gpu import STARTED, kernel_archive
from gpu.measurements import Ceilings, Measurement
from gpu.results_page import draw, markdown
from gpu.suite import (
    INTERRUPTED,
    NAMES,
    NO_DEVICE,
    TIMELINES,
    Findings,
    Suite,
    add_common_options,
    choose,
    device_problem,
    is_dry,
    model_names,
    unpacked,
)
from tidewheel.bench import environment

RESULTS = Path(__file__).parents[1] / "results"
DRY_RUN = Path("build/gpu_dry_run")
PACKAGES = (*environment.PACKAGES, "vllm", "sglang", "lmdeploy")
SECONDS = 465.0  # leaves time for the end of the last stage, plots and the archive within eight minutes
LOG = "run.log"
OURS = ("results.json", "results.md", "*.png", LOG, TIMELINES, kernel_archive.NAME)


def main() -> None:
    options = _options()
    problem = _problem(options)
    if problem:
        print(f"bench-gpu: {problem}", file=sys.stderr)
        raise SystemExit(NO_DEVICE)
    facts = environment.environment(PACKAGES)
    if options.commit:
        facts["commit"] = options.commit
    facts["command"] = environment.command_line("python -m gpu", sys.argv[1:])
    name = f"gpu_{_slug(facts['machine']['gpu'])}{options.suffix}"
    try:
        out = _emptied(options.out or (DRY_RUN if options.dry else RESULTS / name))
    except OSError as error:
        raise SystemExit(f"bench-gpu: results cannot go there: {error}") from None
    signal.signal(signal.SIGTERM, _interrupt)
    print(f"bench-gpu: {facts['machine']['gpu'] or 'dry run on the CPU'}, results in {out}", flush=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _keep_kernels(options.kernel_cache or folder / "kernels", options.kernels)
        suite = _suite(options, out, folder, stack)
        report = Report(out, facts, options.dry)
        try:
            suite.run(report.save)
        except KeyboardInterrupt:
            print(f"bench-gpu: interrupted; what was measured is in {out}", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        finally:
            report.keep_kernels()
        report.save(suite.findings, with_plots=True)
    num_figures, num_failed = (len(suite.findings.of_type(kind)) for kind in ("result", "failed"))
    print(f"bench-gpu: {num_figures} figures in {out / 'results.md'}, {num_failed} parts failed")
    if report.is_unsaved or num_failed or suite.findings.any_stage_failed:
        raise SystemExit(1)


def _suite(options: argparse.Namespace, out: Path, folder: Path, stack: contextlib.ExitStack) -> Suite:
    plans = choose(options.stages, with_peers=options.peers is not None)
    bundle = options.peers and unpacked(options.peers, folder / "bundle")
    common = ["--device", options.device, "--out", str(out), "--shape", "tiny" if options.dry else "real"]
    common += ["--eager"] if options.eager else []
    common += ["--models", options.models] if options.models else []
    log = None
    with contextlib.suppress(OSError):  # a full disk: the terminal shows the same
        log = stack.enter_context((out / LOG).open("w", encoding="utf-8"))
    seconds = options.seconds - (time.monotonic() - STARTED)
    return Suite(plans, common, folder, seconds, bundle=bundle, log=log)


def _keep_kernels(folder: Path, archive: Path | None) -> None:
    """Give engine, kernels and tests one cache of compiled kernels, with those of an earlier run."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    if archive is not None:
        print(f"bench-gpu: {kernel_archive.unpack(archive, folder)} compiled kernels from {archive.name}", flush=True)


class Report:
    """Results on disk, as far as there is room; what cannot be written goes to the terminal at the end."""

    def __init__(self, out: Path, facts: dict[str, Any], is_dry: bool) -> None:
        self._out = out
        self._facts = facts
        self._is_dry = is_dry
        self.is_unsaved = False

    def save(self, findings: Findings, *, with_plots: bool = False) -> None:
        result = {
            **self._facts,
            "dry_run": self._is_dry,
            "workload": "random weights, bfloat16; benchmarks/gpu says what each figure is",
            "stages": findings.stages,
            "fallback": findings.helped,
            "records": findings.records,
        }
        pairs = [(record["stage"], Measurement.from_json(record)) for record in findings.of_type("result")]
        page = markdown(result, pairs, [], Ceilings.of(findings.records))
        try:
            (self._out / "results.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
            (self._out / "results.md").write_text(page)
            if with_plots and importlib.util.find_spec("matplotlib"):
                plots = draw([measurement for _, measurement in pairs], self._out)
                (self._out / "results.md").write_text(markdown(result, pairs, plots, Ceilings.of(findings.records)))
            self.is_unsaved = False
        except OSError as error:
            self.is_unsaved = True
            print(f"bench-gpu: results cannot be written: {error}", file=sys.stderr)
            if with_plots:
                print(page)

    def keep_kernels(self) -> None:
        try:
            kernel_archive.pack(Path(os.environ["TRITON_CACHE_DIR"]), self._out)
        except OSError as error:
            print(f"bench-gpu: compiled kernels cannot be kept: {error}", file=sys.stderr)


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        prog="python -m gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_options(made)
    made.set_defaults(out=None)
    made.add_argument("--stages", type=_names, default=[], help=f"comma-separated, of {', '.join(NAMES)}")
    made.add_argument("--seconds", type=_seconds, default=SECONDS, help="for all of it (default: %(default)g)")
    made.add_argument("--peers", type=Path, help="a bundle of other engines, or the folder it was unpacked to")
    made.add_argument("--suffix", default="", help="of the folder's name: a second run beside the first")
    made.add_argument("--kernels", type=Path, help=f"compiled kernels of an earlier run: its {kernel_archive.NAME}")
    made.add_argument("--kernel-cache", type=Path, help="folder for compiled kernels (default: a temporary one)")
    made.add_argument("--commit", default="", help="to record, where there is no git")
    options = made.parse_args()
    options.dry = is_dry(options)
    model_names(options)
    try:
        choose(options.stages, with_peers=False)
    except ValueError as error:
        made.error(str(error))
    if options.dry and options.out is not None and RESULTS in options.out.resolve().parents:
        made.error(f"--out {options.out}: a dry run measures nothing, so it is never saved among the results")
    for name in ("peers", "kernels"):
        if (path := getattr(options, name)) is not None and not path.exists():
            made.error(f"--{name} {path}: no such file")
    if options.peers is not None and not options.suffix:
        options.suffix = "_peers"
    return options


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text}: must be a number above 0")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _problem(options: argparse.Namespace) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "this Python has no torch: benchmarks/gpu/README.md says what a machine needs"
    return device_problem(options.device)


def _slug(gpu: str | None) -> str:
    """Turn "NVIDIA H200, 143771 MiB, 580.1" into "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", (gpu or "unknown").partition(",")[0].lower()).strip("_")


def _emptied(folder: Path) -> Path:
    """Make the output folder, remove an earlier run's files, and return it. Raise OSError if it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    for pattern in OURS:
        for path in folder.glob(pattern):
            path.unlink()
    return folder


def _interrupt(*_: object) -> None:
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
