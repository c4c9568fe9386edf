"""Shortest job first against first come, first served, on heavy-tailed outputs: simulated and on this CPU.

    python benchmarks/policy_comparison.py [--seconds 60] [--ageing-s 120] [--cpu-clock] [--save]

Short and long answers, lognormal and three to one, differ by tenant and prompt length, as in real traffic. All
requests share one `max_tokens`; `sjf` learns lengths from earlier requests. The engine runs a random 40M-parameter
model in this process; the simulator's cost model is fitted to the `fifo` run. The load slightly exceeds capacity:
without a queue order does not matter. Ageing far below the waiting times turns `sjf` into `fifo`.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import record
from open_loop import Engine, loaded, run_engine
from random_model import SHAPES, make_model
from simulator_accuracy import SETTINGS
from tidewheel.engine.build import build_scheduler
from tidewheel.fleet.router import make_router
from tidewheel.simulate.calibration import facts_of, fit, measured_steps
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.outcomes import Outcomes, throughput
from tidewheel.simulate.replay import Recording
from tidewheel.simulate.simulator import ReplicaSettings, Simulator
from tidewheel.workload.arrival_times import poisson_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import Trace

POLICIES = ("fifo", "sjf")
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


def capacity(engine: Engine, *, cpu_clock: bool) -> float:
    outcomes, _ = run_engine(engine, make_trace(96, None, 99), cpu_clock=cpu_clock)
    return throughput(outcomes)


def simulate(engine: Engine, trace: Trace, cost: CostModel, policy: str) -> tuple[Outcomes, float]:
    """Return outcomes and the mean absolute error of predicted lengths, in tokens."""
    config = dataclasses.replace(engine.config, scheduling_policy=policy)
    scheduler = build_scheduler(config, engine.info)
    simulator = Simulator(
        trace,
        lambda _: scheduler,
        cost,
        ReplicaSettings(
            num_rows=engine.info.max_num_seqs, max_model_len=engine.info.max_model_len, enable_prefix_caching=False
        ),
        num_replicas=1,
        router=make_router("round-robin", 1),
    )
    return simulator.run(), scheduler.stats().prediction_error


def figures(outcomes: Outcomes) -> dict[str, float]:
    latency = outcomes.latency[outcomes.finished]
    return {
        "mean_latency_s": float(latency.mean()),
        "p99_latency_s": float(np.quantile(latency, 0.99)),
        "mean_ttft_s": float(np.nanmean(outcomes.ttft)),
        "finished": int(outcomes.finished.sum()),
    }


def measure(engine: Engine, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rate = arguments.load * capacity(engine, cpu_clock=arguments.cpu_clock)
    trace = make_trace(max(60, round(rate * arguments.seconds)), rate, arguments.seed)
    real: dict[str, dict[str, float]] = {}
    for policy in POLICIES:
        config = dataclasses.replace(
            engine.config, scheduling_policy=policy, record=str(folder) if policy == "fifo" else ""
        )
        outcomes, stats = run_engine(engine, trace, config, cpu_clock=arguments.cpu_clock)
        real[policy] = {**figures(outcomes), "prediction_error_tokens": stats.prediction_error}
    (path,) = folder.iterdir()
    cost = fit(measured_steps(Recording(path).events()), "cpu", **facts_of(engine.info))
    simulated: dict[str, dict[str, float]] = {}
    for policy in POLICIES:
        outcomes, error = simulate(engine, trace, cost, policy)
        simulated[policy] = {**figures(outcomes), "prediction_error_tokens": error}
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of sending (default: %(default)g)")
    parser.add_argument("--load", type=float, default=1.15, help="share of the capacity (default: %(default)g)")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-40m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ageing-s", type=float, default=120.0, help="how long a long answer may be overtaken")
    parser.add_argument("--cpu-clock", action="store_true", help="processor time instead of the wall clock")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/policy_comparison.json")
    arguments = parser.parse_args()
    environment = record.environment("torch", "numpy")
    settings = {
        **SETTINGS,
        "max_num_seqs": MAX_NUM_SEQS,
        "num_threads": arguments.threads,
        "ageing_s": arguments.ageing_s,
        "scheduling_policy": "fifo",
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model", SHAPES[arguments.shape])
        recordings = Path(scratch) / "recordings"
        recordings.mkdir()
        with loaded(folder, **settings) as engine:
            result = measure(engine, arguments, recordings)
    for where in ("engine", "simulator"):
        for policy in POLICIES:
            cells = "  ".join(f"{name} {value:.3f}" for name, value in result[where][policy].items())
            print(f"{where:10} {policy:5} {cells}")
        share = result["reduction"][where]
        print(f"{where:10} mean latency {share:.0%} lower: {'reaches' if share >= GOAL else 'misses'} {GOAL:.0%}")
    if arguments.save:
        print(
            record.save("policy_comparison", {**environment, "settings": {**settings, **vars(arguments)}, **result})
        )


if __name__ == "__main__":
    main()
