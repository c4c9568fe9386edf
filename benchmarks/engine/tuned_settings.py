"""Settings proposed from the first half of a load that changes, against the defaults on its second half.

    python benchmarks tuned_settings --cpu-clock --save

Chats, agents and batch jobs with the objectives of the benchmark `objectives` come in busy spells of four times the
calm rate. The engine runs the first half under the default settings, and records it. `tidewheel tune`'s search
proposes from that recording. The simulator and the engine then run the second half under both settings; the ratio is
that of requests within their objectives.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np

from common.engine_runs import Engine, add_engine_options, random_engine, recorded_run, run_engine
from common.study import Study, show
from engine.objectives import LoneTimes, lone_times, make_trace
from tidewheel.config import EngineConfig
from tidewheel.simulate.calibration import facts_of, fit
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.outcomes import SimulationOutcomes, attainment
from tidewheel.simulate.scenario import simulated_info, simulator_of
from tidewheel.simulate.tuning import GOODPUT, Search, Tuning
from tidewheel.workload.arrivals import switching_arrivals
from tidewheel.workload.traces import Trace

SETTINGS: dict[str, object] = {"dtype": "bfloat16", "max_model_len": 1024, "kv_cache_memory_mb": 512}
NAMES = ("defaults", "proposed")


def make_load(count: int, rate: float, seed: int, lone: LoneTimes) -> Trace:
    arrivals = switching_arrivals(count, rate, np.random.default_rng(seed), ratio=4.0, mean_busy_s=1.0)
    return dataclasses.replace(make_trace(count, rate, seed, lone), arrivals=arrivals)


def simulated(config: EngineConfig, trace: Trace, cost: CostModel) -> SimulationOutcomes:
    info = simulated_info(config, cost, max_model_len=trace.max_num_tokens)
    return simulator_of(config, info, trace, cost).run()


def figures(where: str, settings: str, outcomes: SimulationOutcomes) -> dict[str, Any]:
    everything = np.full(len(outcomes.trace), True)
    return {
        "where": where,
        "settings": settings,
        "met": attainment(outcomes, everything),
        "ttft_p99_s": float(np.nanquantile(outcomes.ttft, 0.99)),
    }


def first_half(engine: Engine, arguments: argparse.Namespace) -> tuple[Tuning, CostModel, Trace]:
    """Return the proposal from the recorded first half, its cost model, and the second half."""
    run_engine(engine, make_trace(32, None, 98))  # warm-up
    lone = lone_times(engine)
    burst = run_engine(engine, make_trace(256, None, 99)).outcomes
    rate = arguments.load * len(burst.trace) / burst.span
    trace = make_load(max(400, round(2 * arguments.seconds * rate)), rate, arguments.seed, lone)
    half = np.arange(len(trace)) < len(trace) // 2
    _, steps = recorded_run(engine, trace.taken(half))
    cost = fit(steps, "cpu", **facts_of(engine.info))
    search = Search(
        engine.config, trace.taken(half), cost, GOODPUT, num_simulations=arguments.simulations, seed=arguments.seed
    )
    return search.run(), cost, trace.taken(~half)


def ratio(rows: list[dict[str, Any]], where: str) -> float:
    met = {name: [row["met"] for row in rows if (row["where"], row["settings"]) == (where, name)] for name in NAMES}
    return float(np.mean(met["proposed"]) / np.mean(met["defaults"]))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with random_engine(arguments, SETTINGS) as engine:
        tuning, cost, trace = first_half(engine, arguments)
        changes = {setting.name: setting.proposed for setting in tuning.settings}
        print(f"{tuning.num_simulations} simulations propose {changes or 'nothing'}", flush=True)
        configs = dict(zip(NAMES, (engine.config, dataclasses.replace(engine.config, **changes)), strict=True))
        rows = [figures("simulator", name, simulated(config, trace, cost)) for name, config in configs.items()]
        if changes:
            with random_engine(arguments, {**SETTINGS, **changes}) as proposed:  # may have larger buffers
                for order in (NAMES, NAMES[::-1])[: arguments.turns]:
                    engines = dict(zip(NAMES, (engine, proposed), strict=True))
                    rows += [figures("engine", name, run_engine(engines[name], trace).outcomes) for name in order]
    show(rows)
    ratios = {where: ratio(rows, where) for where in ("simulator", "engine")} if changes else {}
    return {"changes": changes, "requests": len(trace), "rate": trace.rate, "runs": rows, "ratio": ratios}


def main() -> None:
    study = Study("tuned_settings", __doc__, "torch", "numpy")
    study.add_argument("--seconds", type=float, default=60.0, help="of each half (default: %(default)g)")
    study.add_argument("--load", type=float, default=0.7, help="share of the throughput (default: %(default)g)")
    study.add_argument("--simulations", type=int, default=60, help="at most (default: %(default)s)")
    study.add_argument("--turns", type=int, choices=(1, 2), default=1, help="of the engine's runs")
    study.add_argument("--seed", type=int, default=0)
    add_engine_options(study)
    arguments = study.begin()
    result = measure(arguments)
    for where, value in result["ratio"].items():
        print(f"{where}: {value:.2f} times the requests within their objectives")
    study.save({"settings": {**SETTINGS, **vars(arguments)}, **result})


if __name__ == "__main__":
    main()
