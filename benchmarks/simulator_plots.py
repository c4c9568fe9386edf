"""Plots of the simulator: policies on replicas of an 8B model, and queues beside theory.

python benchmarks/simulator_plots.py [--quick]      writes benchmarks/results/simulator_*.png and .json
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import record
from tidewheel.cli.simulate import add_arguments
from tidewheel.cli.simulation import scenario_of, write_charts
from tidewheel.fleet.router import make_router
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.scheduler.scheduler_config import SchedulerConfig
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.scenario import Result
from tidewheel.simulate.simulation_charts import Knee, knee_chart
from tidewheel.simulate.simulator import ReplicaSettings, Simulator
from tidewheel.workload.arrival_times import poisson_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import synthesise

KNEE_LOADS = (0.7, 0.8, 0.9, 0.95)
STEP_S = 0.010
KINDS = ("geometric:8", "lognormal:8:1.2:400")
NAMES = ("geometric outputs", "lognormal outputs")


def policies(requests: int) -> list[Result]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(
        [
            "--requests", str(requests), "--policy", "fifo,priority,sjf,fair",
            "--load", "0.5,0.7,0.8,0.9,0.95,1.1", "--trace", "bursty", "--output", "lognormal:128:1.2:2048",
            "--tenants", "big:8:4,middle:3:3,small:1:1", "--set", "enable_prefix_caching=false",
            "--set", "max_num_seqs=64",
        ]
    )  # fmt: skip
    return list(scenario_of(arguments).results())


def single_server(load: float, output: str, requests: int) -> tuple[float, float, float]:
    """Return the drawn load, the service time's squared coefficient of variation, and the mean in the system."""
    rng = np.random.default_rng(11)
    lengths = Lengths.parse(output, name="output")
    arrivals = poisson_arrivals(requests, load / (lengths.mean * STEP_S), rng)
    trace = synthesise(arrivals, Lengths.parse("constant:1", name="prompt"), lengths, rng)
    service = trace.output_tokens * STEP_S
    settings = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=64, max_model_len=4096, max_waiting_requests=10**9,
        max_waiting_tokens=10**9, policy="fifo",
    )  # fmt: skip
    simulator = Simulator(
        trace,
        lambda _: Scheduler(settings, KVCacheManager(300, 16, enable_prefix_caching=False)),
        CostModel(name="one token every 10 ms", overhead_s=STEP_S),
        ReplicaSettings(num_rows=1, max_model_len=4096, enable_prefix_caching=False),
        num_replicas=1,
        router=make_router("round-robin", 1),
    )
    outcomes = simulator.run()
    drawn = float(service.sum() / trace.arrivals[-1])
    return drawn, float(service.var() / service.mean() ** 2), float(outcomes.latency.sum() / outcomes.span)


def knees(requests: int) -> list[Knee]:
    found = []
    for name, kind in zip(NAMES, KINDS, strict=True):
        points = [single_server(load, kind, requests) for load in KNEE_LOADS]
        loads, scvs, numbers = zip(*points, strict=True)
        found.append(Knee(name, float(np.mean(scvs)), loads, numbers))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    arguments = parser.parse_args()
    environment = record.environment("numpy", "matplotlib")
    scale = 10 if arguments.quick else 1
    results, queues = policies(8000 // scale), knees(40_000 // scale)
    record.RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for path in write_charts(results, Path(scratch)):
            shutil.copy(path, record.RESULTS / f"simulator_{path.name}")
    (record.RESULTS / "simulator_knee.png").write_bytes(knee_chart(queues).png())
    rows: list[dict[str, Any]] = [{"policy": r.policy, "load": r.load, **r.figures} for r in results]
    print(record.save("simulator_plots", {**environment, "policies": rows, "queues": [q._asdict() for q in queues]}))


if __name__ == "__main__":
    main()
