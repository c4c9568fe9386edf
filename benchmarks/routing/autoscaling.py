"""Scaling policies on a day of traffic with the shape of a published trace, in the simulator.

    python benchmarks autoscaling --save

A replica is an 8B model on an L40S, by its data sheet. Days have the shapes of Azure's LLM inference traces of 2024
(`tidewheel.workload.day_shapes`), at a share of their rate. The forecast has seen the five days before. Two replicas
are ready at first. A request that is refused, or whose first token or further tokens come too late, misses the
objective. Replica hours count starting and draining replicas. Decode steps are merged; `accuracy` compares that with
a simulation of every step. The weekend's day has a third of the arrivals that the forecast expects.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from common.study import RESULTS, Study, show
from tidewheel.bench.charts import COLOURS, GREYS, ChartImage, legend_below, panels, style
from tidewheel.config import EngineConfig
from tidewheel.fleet.scaling import ScalingSettings
from tidewheel.simulate.coarse_replica import CoarseLimits
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.fleet import ScalingPlan
from tidewheel.simulate.fleet_choice import make_scaling
from tidewheel.simulate.scenario import UNBOUNDED, simulated_info, simulator_of
from tidewheel.simulate.simulator import Simulator
from tidewheel.stats import Objective
from tidewheel.workload.arrivals import bursty_arrivals
from tidewheel.workload.day_shapes import DAY_S, DAY_SHAPES, GAP_BURSTINESS, DayShape, day_arrivals
from tidewheel.workload.traces import Trace, synthesise

# 80 % and 60 % of the data sheet's 864 GB/s and 362 TFLOP/s (bfloat16, dense), as in the built-in cost model.
L40S_8B = CostModel.from_device(
    "l40s-8b",
    num_parameters=8.03e9,
    weights_bytes=16.06e9,
    kv_bytes_per_token=2 * 32 * 8 * 128 * 2,
    bytes_per_s=0.8 * 864e9,
    flops_per_s=0.6 * 362e12,
    launch_s=1e-3,
    device="NVIDIA L40S (from its data sheet)",
    block_size=64,
    num_blocks=3050,
)
OBJECTIVE = Objective(ttft_s=2.0, tpot_s=0.2)
GOAL = 0.01  # misses that the best constant number may have
HISTORY_DAYS = 5
POLICIES = ("reactive", "predictive", "queue-depth", "ongoing")
SHARES = {"coding": 0.15, "conversation": 0.15}  # of the trace's rate
CONFIG = EngineConfig.from_settings({"model": "simulated", "max_waiting_tokens": str(UNBOUNDED)})
MAX_MODEL_LEN = 16_384


def simulator(
    trace: Trace, num_replicas: int, *, is_coarse: bool = True, plan: ScalingPlan | None = None
) -> Simulator:
    info = simulated_info(CONFIG, L40S_8B, max_model_len=MAX_MODEL_LEN)
    limits = CoarseLimits(info.max_num_seqs, info.max_num_batched_tokens, info.num_blocks * info.block_size)
    deployment = {"num_replicas": num_replicas, "router": "least-loaded", "scaling": plan}
    return simulator_of(CONFIG, info, trace, L40S_8B, coarse=limits if is_coarse else None, **deployment)


def capacity(shape: DayShape) -> float:
    """Return the tokens per second of one replica that is always full."""
    rng = np.random.default_rng(2)
    full = simulator(synthesise(np.zeros(4000), shape.prompt, shape.output, rng), 1)
    full.run()
    return full.replicas[0].num_tokens / full.replicas[0].busy_seconds


def run(trace: Trace, history: list[float], name: str, settings: ScalingSettings) -> tuple[dict[str, Any], Simulator]:
    """Run a policy; `constant` keeps `max_replicas`."""
    is_constant = name == "constant"
    plan = None if is_constant else ScalingPlan(make_scaling(name, settings, history), settings.startup_s)
    simulated = simulator(trace, settings.max_replicas if is_constant else 2, plan=plan)
    cpu = time.process_time()
    outcomes = simulated.run()
    cpu = time.process_time() - cpu
    figures = simulated.summary()
    return {
        "policy": f"constant {settings.max_replicas}" if is_constant else name,
        "misses_percent": round(100 * float(outcomes.misses(OBJECTIVE).mean()), 3),
        "ttft_p99_s": round(figures["ttft_s"]["p99"], 2),
        "refused": figures["refused"],
        "replica_hours": round(figures["replicas"]["hours"], 1),
        "most": figures["replicas"]["most"],
        "changes": len(simulated.fleet.changes) - settings.max_replicas
        if is_constant
        else len(simulated.fleet.changes),
        "cpu_s": round(cpu, 1),
        "times_real_time": round(DAY_S / cpu),
    }, simulated


def day(shape: DayShape, share: float, seed: int) -> tuple[Trace, list[float]]:
    """Return the last day, and the arrivals of those before."""
    rng = np.random.default_rng(seed)
    arrivals = day_arrivals(shape, share * shape.requests_per_s, HISTORY_DAYS + 1, rng)
    begin = HISTORY_DAYS * DAY_S
    last = arrivals[arrivals >= begin] - begin
    return synthesise(last, shape.prompt, shape.output, rng), arrivals[arrivals < begin].tolist()


def thinned(trace: Trace, share: float) -> Trace:
    """Return a random part of the requests."""
    kept = np.random.default_rng(3).random(len(trace)) < share
    return Trace.of(trace.arrivals[kept], trace.prompt_tokens[kept], trace.output_tokens[kept])


def constants(trace: Trace, per_replica: float) -> Iterator[dict[str, Any]]:
    """Yield constant numbers from the fewest that suffice in the mean to the first that meets the goal."""
    work = float((trace.prompt_tokens + trace.output_tokens).sum()) / DAY_S
    for number in range(math.ceil(work / per_replica), 100):
        result, _ = run(trace, [], "constant", ScalingSettings(max_replicas=number))
        yield result
        if result["misses_percent"] <= 100 * GOAL:
            return


def measure_day(shape: DayShape, share: float, seed: int, chart: dict[str, Simulator]) -> dict[str, Any]:
    trace, history = day(shape, share, seed)
    per_replica = capacity(shape)
    settings = ScalingSettings(max_replicas=12, replica_tokens_per_s=per_replica)
    runs = []
    for name in POLICIES:
        result, chart[name] = run(trace, history, name, settings)
        runs.append(result)
    learned, _ = run(trace, history, "reactive", ScalingSettings(max_replicas=12))
    runs += [{**learned, "policy": "reactive, capacity learned"}, *constants(trace, per_replica)]
    print(f"\n{shape.name}: {len(trace)} requests, a replica computes {per_replica:.0f} tokens/s")
    show(runs)
    slow = ScalingSettings(max_replicas=12, replica_tokens_per_s=per_replica, startup_s=600)
    others = [{**run(trace, history, name, slow)[0], "case": "600 s to start"} for name in ("reactive", "predictive")]
    part = thinned(trace, 1 / 3)
    others += [{**run(part, history, name, settings)[0], "case": "weekend"} for name in ("reactive", "predictive")]
    show(others)
    return {"shape": shape.name, "share": share, "requests": len(trace), "replica_tokens_per_s": round(per_replica),
            "runs": runs, "others": others}  # fmt: skip


def accuracy(shape: DayShape, count: int) -> dict[str, Any]:
    """Return figures of two replicas at 60 % of their capacity, exact and with merged steps."""
    rng = np.random.default_rng(1)
    rate = 1.2 * capacity(shape) / (shape.prompt.mean + shape.output.mean)
    trace = synthesise(bursty_arrivals(count, rate, rng, burstiness=GAP_BURSTINESS), shape.prompt, shape.output, rng)
    row: dict[str, Any] = {"shape": shape.name}
    for name, is_coarse in (("exact", False), ("merged", True)):
        simulated = simulator(trace, 2, is_coarse=is_coarse)
        simulated.run()
        figures = simulated.summary()
        row |= {f"{name} TTFT {quantile}": round(figures["ttft_s"][quantile], 3) for quantile in ("p50", "p99")}
        row |= {f"{name} TPOT p50": round(figures["tpot_s"]["p50"], 4), f"{name} steps": figures["replicas"]["steps"]}
    return row


def picture(shape: DayShape, simulators: dict[str, Simulator]) -> ChartImage:
    figure, (rates, counts) = panels(rows=2, width=11.0, height=6.4, sharex=True)
    arrivals = simulators["reactive"].outcomes.trace.arrivals
    per_bucket, edges = np.histogram(arrivals, bins=np.arange(0, DAY_S + 1, 300))
    rates.plot(edges[:-1] / 3600, per_bucket / 300, color=GREYS[0])
    style(rates, "Requests per second", f"a day with the shape of Azure's {shape.name} service")
    rates.set_ylim(bottom=0)
    for index, name in enumerate(("reactive", "predictive", "queue-depth")):
        times, numbers = zip(*simulators[name].fleet.changes, strict=True)
        last = (*(at / 3600 for at in times), 24.0)
        counts.step(last, (*numbers, numbers[-1]), where="post", color=COLOURS[index], label=name, alpha=0.85)
    style(counts, "Replicas", "starting and draining ones included")
    counts.set_xlabel("hour of the day")
    counts.set_xlim(0, 24)
    counts.set_ylim(bottom=0)
    legend_below(figure, counts)
    return ChartImage(f"autoscaling_{shape.name}", "Replicas over a day", figure)


def main() -> None:
    study = Study("autoscaling", __doc__, "numpy")
    study.add_argument("--shapes", nargs="+", default=list(DAY_SHAPES), choices=list(DAY_SHAPES))
    study.add_argument("--seed", type=int, default=0)
    study.add_argument("--exact-requests", type=int, default=2000, help="for the accuracy (default: %(default)s)")
    arguments = study.begin()
    days = []
    for name in arguments.shapes:
        chart: dict[str, Simulator] = {}
        days.append(measure_day(DAY_SHAPES[name], SHARES[name], arguments.seed, chart))
        if arguments.save:
            path = RESULTS / f"autoscaling_{name}.webp"
            path.write_bytes(picture(DAY_SHAPES[name], chart).webp())
    compared = [accuracy(DAY_SHAPES[name], arguments.exact_requests) for name in arguments.shapes]
    show(compared)
    study.save({"seed": arguments.seed, "objective": asdict(OBJECTIVE), "days": days, "accuracy": compared})


if __name__ == "__main__":
    main()
