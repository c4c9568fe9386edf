"""Measure all claims about speed on a GPU, in one command.

    make bench-gpu                                all stages, within ten minutes
    make bench-gpu PEERS=peers.tar.xz             peer kernels and engines too, in another ten
    python -m gpu --device cpu                    a dry run of the programs, which measures nothing

Each stage is also a program: python -m gpu.kernels --help. benchmarks/gpu/README.md says what a machine needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from gpu.measurements import Measurement
from gpu.results_page import draw, markdown
from gpu.suite import (
    INTERRUPTED,
    NAMES,
    NO_DEVICE,
    Findings,
    Suite,
    add_common_options,
    choose,
    device_problem,
    is_dry,
    unpacked,
)
from tidewheel.bench import environment

RESULTS = Path(__file__).parents[1] / "results"
DRY_RUN = Path("build/gpu_dry_run")
PACKAGES = (*environment.PACKAGES, "vllm", "sglang", "lmdeploy")
SECONDS = 555.0  # leaves time for the plots within ten minutes
OURS = ("results.json", "results.md", "*.png", "idle_*.json.gz")


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
    out = _emptied(options.out or (DRY_RUN if options.dry else RESULTS / name))
    signal.signal(signal.SIGTERM, _interrupt)
    print(f"bench-gpu: {facts['machine']['gpu'] or 'dry run on the CPU'}, results in {out}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plans = choose(options.stages, with_peers=options.peers is not None)
        bundle = options.peers and unpacked(options.peers, folder / "bundle")
        common = ["--device", options.device, "--out", str(out), "--shape", "tiny" if options.dry else "real"]
        if options.models:
            common += ["--models", options.models]
        suite = Suite(plans, common, folder, options.seconds, bundle)
        try:
            suite.run(lambda findings: _save(out, facts, findings, options.dry))
        except KeyboardInterrupt:
            print(f"bench-gpu: interrupted; what was measured is in {out}", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
    _save(out, facts, suite.findings, options.dry, with_plots=True)
    print(f"bench-gpu: {len(suite.findings.of_type('result'))} figures in {out / 'results.md'}")
    if any(stage["outcome"].startswith(("FAILED", "stopped")) for stage in suite.findings.stages):
        raise SystemExit(1)


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        prog="python -m gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_options(made)
    made.set_defaults(out=None)
    made.add_argument("--stages", type=_names, default=[], help=f"comma-separated, of {', '.join(NAMES)}")
    made.add_argument("--seconds", type=float, default=SECONDS, help="for all of it (default: %(default)g)")
    made.add_argument("--peers", type=Path, help="a bundle of other engines, or the folder it was unpacked to")
    made.add_argument("--suffix", default="", help="of the folder's name: a second run beside the first")
    made.add_argument("--commit", default="", help="to record, where there is no git")
    options = made.parse_args()
    options.dry = is_dry(options)
    try:
        choose(options.stages, with_peers=False)
    except ValueError as error:
        made.error(str(error))
    if options.dry and options.out is not None and RESULTS in options.out.resolve().parents:
        made.error(f"--out {options.out}: a dry run measures nothing, so it is never saved among the results")
    if options.peers is not None and not options.peers.exists():
        made.error(f"--peers {options.peers}: no such file")
    if options.peers is not None and not options.suffix:
        options.suffix = "_peers"
    return options


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _problem(options: argparse.Namespace) -> str | None:
    for package in ("torch", "msgspec", "zmq", "tritonclient"):
        if importlib.util.find_spec(package) is None:
            return f"this Python has no {package}: benchmarks/gpu/README.md says how to bring what is missing"
    return device_problem(options.device)


def _slug(gpu: str | None) -> str:
    """Turn "NVIDIA H200, 143771 MiB, 580.1" into "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", (gpu or "unknown").partition(",")[0].lower()).strip("_")


def _emptied(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in OURS:
        for path in folder.glob(pattern):
            path.unlink()
    return folder


def _interrupt(*_: object) -> None:
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def _save(out: Path, facts: dict[str, Any], findings: Findings, is_dry: bool, *, with_plots: bool = False) -> None:
    result = {
        **facts,
        "dry_run": is_dry,
        "workload": "random weights, bfloat16; benchmarks/gpu says what each figure is",
        "stages": findings.stages,
        "records": findings.records,
    }
    pairs = [(record["stage"], Measurement.from_json(record)) for record in findings.of_type("result")]
    plots: list[str] = []
    if with_plots and importlib.util.find_spec("matplotlib"):
        plots = draw([measurement for _, measurement in pairs], out)
    (out / "results.json").write_text(json.dumps(result, indent=None, separators=(",", ":")) + "\n")
    (out / "results.md").write_text(markdown(result, pairs, plots))


if __name__ == "__main__":
    main()
