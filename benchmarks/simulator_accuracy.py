"""Accuracy of the simulator against the real engine on this CPU, at loads outside its calibration.

    python benchmarks/simulator_accuracy.py [--save] [--seconds 60] [--cpu-clock]

A cost model is fitted to three recorded loads of the engine, which runs a random 40M-parameter model (Qwen3 shape) in
this process. Engine and simulator then run three loads of other rates, lengths and arrivals, and are compared by
output tokens per second and p99 of the time to first token. Both parts take turns, so drift hits both alike.
`--cpu-clock` uses processor time, for a shared machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import record
from open_loop import Engine, loaded, run_engine
from random_model import SHAPES, make_model
from tidewheel.simulate.calibration import MeasuredStep, facts_of, fit, measured_steps
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.outcomes import Outcomes
from tidewheel.simulate.replay import Recording
from tidewheel.simulate.scenario import simulator_of
from tidewheel.workload.arrival_times import FloatArray, bursty_arrivals, poisson_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import Trace, synthesise

LIMIT = 0.15
SETTINGS: dict[str, object] = {
    "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 256,
    "kv_cache_memory_mb": 512, "enable_prefix_caching": False,
}  # fmt: skip

Arrivals = Callable[[int, float, np.random.Generator], FloatArray]


class Load(NamedTuple):
    name: str
    share: float
    prompt: str
    output: str
    arrivals: Arrivals = poisson_arrivals


CALIBRATION = (
    Load("calibration 40 %", 0.4, "lognormal:64:0.8:512", "geometric:32"),
    Load("calibration 75 %", 0.75, "uniform:64", "lognormal:32:0.8:256"),
    Load("calibration 130 %", 1.3, "lognormal:64:0.8:512", "geometric:32"),
)
PREDICTED = (
    Load("60 %, Poisson", 0.6, "lognormal:96:1:512", "lognormal:48:1:256"),
    Load("70 %, bursts", 0.7, "geometric:48", "uniform:48", bursty_arrivals),
    Load("115 %, Poisson", 1.15, "uniform:96", "geometric:24"),
)


def make_trace(load: Load, tokens_per_s: float, seconds: float, seed: int) -> Trace:
    """Return a trace whose rate asks for the load's share of `tokens_per_s`."""
    prompt, output = Lengths.parse(load.prompt, name="prompt"), Lengths.parse(load.output, name="output")
    rate = load.share * tokens_per_s / (output.mean + prompt.mean / PROMPT_WEIGHT)
    count = max(30, round(rate * seconds))
    rng = np.random.default_rng(seed)
    return synthesise(load.arrivals(count, rate, rng), prompt, output, rng)


PROMPT_WEIGHT = 4.0  # prompt tokens worth one output token; only sets rates


def capacity(engine: Engine, requests: int, *, cpu_clock: bool) -> float:
    """Return weighted tokens per second of requests that come at once."""
    rng = np.random.default_rng(99)
    constant = Lengths.parse("constant:64", name="prompt"), Lengths.parse("uniform:32", name="output")
    outcomes, _ = run_engine(engine, synthesise(np.zeros(requests), *constant, rng), cpu_clock=cpu_clock)
    weighted = outcomes.output_tokens.sum() + outcomes.trace.prompt_tokens.sum() / PROMPT_WEIGHT
    return float(weighted) / outcomes.span


def calibration_steps(engine: Engine, trace: Trace, folder: Path, *, cpu_clock: bool) -> list[MeasuredStep]:
    before = set(folder.iterdir())
    run_engine(engine, trace, dataclasses.replace(engine.config, record=str(folder)), cpu_clock=cpu_clock)
    (path,) = set(folder.iterdir()) - before
    return measured_steps(Recording(path).events())


def predict(engine: Engine, trace: Trace, cost: CostModel) -> Outcomes:
    return simulator_of(engine.config, engine.info, trace, cost).run()


def compare(load: Load, measured: Outcomes, predicted: Outcomes) -> dict[str, Any]:
    figures = {
        "output_tokens_per_s": [float(o.output_tokens.sum()) / o.span for o in (measured, predicted)],
        "ttft_p99_s": [float(np.nanquantile(o.ttft, 0.99)) for o in (measured, predicted)],
        "ttft_p50_s": [float(np.nanquantile(o.ttft, 0.5)) for o in (measured, predicted)],
        "tpot_mean_s": [float(np.nanmean(o.tpot)) for o in (measured, predicted)],
    }
    return {
        "load": load.name,
        "requests": len(measured.trace),
        "requests_per_s": measured.trace.rate,
        **{
            name: {"measured": real, "predicted": simulated, "error": simulated / real - 1}
            for name, (real, simulated) in figures.items()
        },
    }


def measure(engine: Engine, seconds: float, scratch: Path, *, cpu_clock: bool) -> dict[str, Any]:
    capacity(engine, 64, cpu_clock=cpu_clock)  # warm-up
    tokens_per_s = capacity(engine, 192, cpu_clock=cpu_clock)
    steps: list[MeasuredStep] = []
    real: list[tuple[Load, Outcomes]] = []
    for seed, (known, unknown) in enumerate(zip(CALIBRATION, PREDICTED, strict=True)):
        steps += calibration_steps(
            engine, make_trace(known, tokens_per_s, seconds, seed), scratch, cpu_clock=cpu_clock
        )
        trace = make_trace(unknown, tokens_per_s, seconds, 100 + seed)
        real.append((unknown, run_engine(engine, trace, cpu_clock=cpu_clock).outcomes))
        print(f"ran {known.name} and {unknown.name}", flush=True)
    cost = fit(steps, "cpu", **facts_of(engine.info))
    loads = [compare(load, outcomes, predict(engine, outcomes.trace, cost)) for load, outcomes in real]
    return {"cost_model": dataclasses.asdict(cost), "weighted_tokens_per_s": tokens_per_s, "loads": loads}


def show(result: dict[str, Any]) -> float:
    worst = 0.0
    for load in result["loads"]:
        cells = []
        for name, scale, unit in (("output_tokens_per_s", 1, "tok/s"), ("ttft_p99_s", 1e3, "ms p99 TTFT")):
            figure = load[name]
            real, simulated = figure["measured"] * scale, figure["predicted"] * scale
            cells.append(f"{real:8.0f} -> {simulated:8.0f} {unit} ({figure['error']:+.1%})")
            worst = max(worst, abs(figure["error"]))
        print(f"{load['load']:16} {load['requests']:5} requests  {'   '.join(cells)}")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the six loads (default: %(default)g)")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-40m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-clock", action="store_true", help="processor time instead of the wall clock")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/simulator_accuracy.json")
    arguments = parser.parse_args()
    environment = record.environment("torch", "numpy")
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model", SHAPES[arguments.shape])
        recordings = Path(scratch) / "recordings"
        recordings.mkdir()
        with loaded(folder, **SETTINGS, num_threads=arguments.threads) as engine:
            result = measure(engine, arguments.seconds, recordings, cpu_clock=arguments.cpu_clock)
    worst = show(result)
    print(f"largest error {worst:.1%}: {'within' if worst <= LIMIT else 'over'} {LIMIT:.0%}")
    if arguments.save:
        settings = {**SETTINGS, **vars(arguments)}
        del settings["save"]
        print(
            record.save("simulator_accuracy", {**environment, "settings": settings, "largest_error": worst, **result})
        )


if __name__ == "__main__":
    main()
