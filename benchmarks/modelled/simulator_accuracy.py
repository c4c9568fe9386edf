"""Accuracy of the simulator against the real engine on this CPU, at loads outside its calibration.

    python benchmarks simulator_accuracy --cpu-clock --save

A cost model is fitted to three recorded loads of the engine, on a random 40M-parameter model in this process. Engine
and simulator then run three loads of other rates, lengths and arrivals. Both parts take turns, so drift hits both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from common.engine_runs import Engine, add_engine_options, random_engine, recorded_run, run_engine
from common.study import Study, show
from tidewheel.simulate.calibration import MeasuredStep, facts_of, fit
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.outcomes import SimulationOutcomes, throughput
from tidewheel.simulate.scenario import simulator_of
from tidewheel.workload.arrivals import FloatArray, bursty_arrivals, poisson_arrivals
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


PROMPT_WEIGHT = 4.0  # prompt tokens worth one output token; only sets rates


def make_trace(load: Load, tokens_per_s: float, seconds: float, seed: int) -> Trace:
    """Return a trace whose rate asks for the load's share of `tokens_per_s`."""
    prompt, output = Lengths.parse(load.prompt, name="prompt"), Lengths.parse(load.output, name="output")
    rate = load.share * tokens_per_s / (output.mean + prompt.mean / PROMPT_WEIGHT)
    count = max(30, round(rate * seconds))
    rng = np.random.default_rng(seed)
    return synthesise(load.arrivals(count, rate, rng), prompt, output, rng)


def capacity(engine: Engine, requests: int) -> float:
    """Return weighted tokens per second in the middle of a run of requests that come at once."""
    prompt, output = Lengths.parse("constant:64", name="prompt"), Lengths.parse("uniform:32", name="output")
    trace = synthesise(np.zeros(requests), prompt, output, np.random.default_rng(99))
    outcomes, _ = run_engine(engine, trace)
    return throughput(outcomes) * float((trace.output_tokens + trace.prompt_tokens / PROMPT_WEIGHT).mean())


def compare(load: Load, measured: SimulationOutcomes, predicted: SimulationOutcomes) -> dict[str, Any]:
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


def predict(engine: Engine, trace: Trace, cost: CostModel) -> SimulationOutcomes:
    return simulator_of(engine.config, engine.info, trace, cost).run()


def measure(engine: Engine, seconds: float) -> dict[str, Any]:
    capacity(engine, 64)  # warm-up
    tokens_per_s = capacity(engine, 192)
    steps: list[MeasuredStep] = []
    real: list[tuple[Load, SimulationOutcomes]] = []
    for seed, (known, unknown) in enumerate(zip(CALIBRATION, PREDICTED, strict=True)):
        trace = make_trace(known, tokens_per_s, seconds, seed)
        steps += recorded_run(engine, trace)[1]
        trace = make_trace(unknown, tokens_per_s, seconds, 100 + seed)
        real.append((unknown, run_engine(engine, trace).outcomes))
        print(f"ran {known.name} and {unknown.name}", flush=True)
    cost = fit(steps, "cpu", **facts_of(engine.info))
    loads = [compare(load, outcomes, predict(engine, outcomes.trace, cost)) for load, outcomes in real]
    return {"cost_model": dataclasses.asdict(cost), "weighted_tokens_per_s": tokens_per_s, "loads": loads}


def main() -> None:
    study = Study("simulator_accuracy", __doc__, "torch", "numpy")
    study.add_argument("--seconds", type=float, default=60.0, help="of each of the six loads (default: %(default)g)")
    add_engine_options(study)
    arguments = study.begin()
    with random_engine(arguments, SETTINGS) as engine:
        result = measure(engine, arguments.seconds)
    compared = ("output_tokens_per_s", "ttft_p99_s")
    rows = [{"load": load["load"], "figure": name, **load[name]} for load in result["loads"] for name in compared]
    show(rows)
    worst = max(abs(row["error"]) for row in rows)
    print(f"largest error {worst:.1%}: {'within' if worst <= LIMIT else 'over'} {LIMIT:.0%}")
    study.save({"settings": {**SETTINGS, **vars(arguments)}, "largest_error": worst, **result})


if __name__ == "__main__":
    main()
