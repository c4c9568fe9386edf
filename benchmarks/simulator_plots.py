"""Plots of the simulator: policies on replicas of an 8B model, and queues beside theory.

python benchmarks/simulator_plots.py --save         without --save, pictures go to build/
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from simulator_speed import scenario_from
from study import BUILD, RESULTS, Study
from tidewheel.cli.simulation import write_charts
from tidewheel.config import EngineConfig
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.scenario import Result, simulated_info, simulator_of
from tidewheel.simulate.simulation_charts import Knee, knee_chart
from tidewheel.workload.arrival_times import poisson_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import synthesise

KNEE_LOADS = (0.7, 0.8, 0.9, 0.95)
STEP_S = 0.010
KINDS = ("geometric:8", "lognormal:8:1.2:400")
NAMES = ("geometric outputs", "lognormal outputs")


def policies(requests: int) -> list[Result]:
    options = [
        "--requests", str(requests), "--policy", "fifo,priority,sjf,fair", "--load", "0.5,0.7,0.8,0.9,0.95,1.1",
        "--trace", "bursty", "--output", "lognormal:128:1.2:2048", "--tenants", "big:8:4,middle:3:3,small:1:1",
        "--set", "enable_prefix_caching=false", "--set", "max_num_seqs=64",
    ]  # fmt: skip
    return list(scenario_from(options).results())


def single_server(load: float, output: str, requests: int) -> tuple[float, float, float]:
    """Return load, squared coefficient of variation of the service time, and mean number in the system."""
    rng = np.random.default_rng(11)
    lengths = Lengths.parse(output, name="output")
    arrivals = poisson_arrivals(requests, load / (lengths.mean * STEP_S), rng)
    trace = synthesise(arrivals, Lengths.parse("constant:1", name="prompt"), lengths, rng)
    service = trace.output_tokens * STEP_S
    config = EngineConfig(
        model="none", max_num_seqs=1, max_num_batched_tokens=64, max_model_len=4096, max_waiting_requests=10**9,
        max_waiting_tokens=10**9, scheduling_policy="fifo", num_blocks=300, block_size=16,
        enable_prefix_caching=False, async_scheduling=False,
    )  # fmt: skip
    cost = CostModel(name="one token every 10 ms", overhead_s=STEP_S)
    outcomes = simulator_of(config, simulated_info(config, cost, max_model_len=4096), trace, cost).run()
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
    study = Study("simulator_plots", __doc__, "numpy", "matplotlib")
    study.add_argument("--quick", action="store_true", help="a tenth of the requests")
    options = study.begin()
    scale = 10 if options.quick else 1
    results, queues = policies(8000 // scale), knees(40_000 // scale)
    out = RESULTS if options.save else BUILD
    with tempfile.TemporaryDirectory() as scratch:
        for path in write_charts(results, Path(scratch)):
            shutil.copy(path, out / f"simulator_{path.name}")
    (out / "simulator_knee.png").write_bytes(knee_chart(queues).png())
    rows: list[dict[str, Any]] = [{"policy": r.policy, "load": r.load, **r.figures} for r in results]
    study.save({"policies": rows, "queues": [queue._asdict() for queue in queues]})


if __name__ == "__main__":
    main()
