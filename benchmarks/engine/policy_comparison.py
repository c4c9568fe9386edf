"""Shortest job first against first come, first served, on heavy-tailed outputs: simulated and on this CPU.

    python benchmarks policy_comparison --cpu-clock --save

Short and long answers, three to one, differ by tenant and prompt length. All requests share one `max_tokens`; `sjf`
learns lengths from earlier requests. The simulator's cost model is fitted to the engine's `fifo` run. The load
slightly exceeds capacity: without a queue order does not matter. Ageing far below the waiting times makes `sjf`
`fifo`.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np

from common.engine_runs import Engine, add_engine_options, random_engine, recorded_run, run_engine
from common.study import Study, show
from modelled.simulator_accuracy import SETTINGS
from tidewheel.simulate.calibration import facts_of, fit
from tidewheel.simulate.outcomes import SimulationOutcomes, throughput
from tidewheel.simulate.scenario import simulator_of
from tidewheel.stats import EngineStats
from tidewheel.workload.arrivals import poisson_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import Trace

POLICIES, PLACES = ("fifo", "sjf"), ("engine", "simulator")
GOAL = 0.30
LONG_SHARE = 0.25
KINDS = (
    ("chat", "lognormal:32:0.5:256", "lognormal:12:0.6:256"),
    ("report", "lognormal:96:0.5:256", "lognormal:120:0.6:256"),
)
MAX_NUM_SEQS = 8  # makes the waiting order matter


def make_trace(count: int, rate: float | None, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    is_long = rng.random(count) < LONG_SHARE
    drawn = [
        [Lengths.parse(text, name=name).draw(count, rng) for name, text in (("prompt", prompt), ("output", output))]
        for _, prompt, output in KINDS
    ]
    (short_prompts, short_outputs), (long_prompts, long_outputs) = drawn
    return Trace.of(
        np.zeros(count) if rate is None else poisson_arrivals(count, rate, rng),
        np.where(is_long, long_prompts, short_prompts),
        np.where(is_long, long_outputs, short_outputs),
        tenants=is_long,
        tenant_names=tuple(name for name, *_ in KINDS),
    )


def figures(outcomes: SimulationOutcomes, stats: EngineStats) -> dict[str, float]:
    latency = outcomes.latency[outcomes.finished]
    return {
        "mean_latency_s": float(latency.mean()),
        "p99_latency_s": float(np.quantile(latency, 0.99)),
        "mean_ttft_s": float(np.nanmean(outcomes.ttft)),
        "finished": int(outcomes.finished.sum()),
        "prediction_error_tokens": stats.prediction_error,
    }


def measure(engine: Engine, arguments: argparse.Namespace) -> dict[str, Any]:
    rate = arguments.load * throughput(run_engine(engine, make_trace(96, None, 99)).outcomes)
    trace = make_trace(max(60, round(rate * arguments.seconds)), rate, arguments.seed)
    fifo, steps = recorded_run(engine, trace)
    cost = fit(steps, "cpu", **facts_of(engine.info))
    runs = {
        "fifo": fifo,
        "sjf": run_engine(engine, trace, dataclasses.replace(engine.config, scheduling_policy="sjf")),
    }
    real = {policy: figures(*run) for policy, run in runs.items()}
    simulated: dict[str, dict[str, float]] = {}
    for policy in POLICIES:
        config = dataclasses.replace(engine.config, scheduling_policy=policy)
        simulator = simulator_of(config, engine.info, trace, cost)
        outcomes, (replica,) = simulator.run(), simulator.replicas
        simulated[policy] = figures(outcomes, replica.scheduler.stats())
    return {
        "requests": len(trace),
        "requests_per_s": trace.rate,
        "output_tokens": {"mean": float(trace.output_tokens.mean()), "std": float(trace.output_tokens.std())},
        "engine": real,
        "simulator": simulated,
        "reduction": {name: reduction(part) for name, part in (("engine", real), ("simulator", simulated))},
    }


def reduction(part: dict[str, dict[str, float]]) -> float:
    return 1 - part["sjf"]["mean_latency_s"] / part["fifo"]["mean_latency_s"]


def main() -> None:
    study = Study("policy_comparison", __doc__, "torch", "numpy")
    study.add_argument("--seconds", type=float, default=60.0, help="of sending (default: %(default)g)")
    study.add_argument("--load", type=float, default=1.15, help="share of the capacity (default: %(default)g)")
    study.add_argument("--seed", type=int, default=0)
    study.add_argument("--ageing-s", type=float, default=120.0, help="how long a long answer may be overtaken")
    add_engine_options(study)
    arguments = study.begin()
    settings = {
        **SETTINGS,
        "max_num_seqs": MAX_NUM_SEQS,
        "ageing_s": arguments.ageing_s,
        "scheduling_policy": "fifo",
    }
    with random_engine(arguments, settings) as engine:
        result = measure(engine, arguments)
    show({"where": place, "policy": policy, **result[place][policy]} for place in PLACES for policy in POLICIES)
    for place, share in result["reduction"].items():
        print(f"{place:10} mean latency {share:.0%} lower: {'reaches' if share >= GOAL else 'misses'} {GOAL:.0%}")
    study.save({"settings": {**settings, **vars(arguments)}, **result})


if __name__ == "__main__":
    main()
