"""Queue length against load in the simulator, one request at a time, beside theory.

python benchmarks/simulator_knee.py --save         without --save, the picture goes to build/
"""

from __future__ import annotations

import numpy as np

from study import BUILD, RESULTS, Study
from tidewheel.config import EngineConfig
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.scenario import simulated_info, simulator_of
from tidewheel.simulate.simulation_charts import Knee, knee_chart
from tidewheel.workload.arrival_times import poisson_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import synthesise

KNEE_LOADS = (0.7, 0.8, 0.9, 0.95)
STEP_S = 0.010
KINDS = ("geometric:8", "lognormal:8:1.2:400")
NAMES = ("geometric outputs", "lognormal outputs")


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
    study = Study("simulator_knee", __doc__, "numpy", "matplotlib")
    study.add_argument("--requests", type=int, default=40_000, help="of each load (default: %(default)s)")
    options = study.begin()
    queues = knees(options.requests)
    folder = RESULTS if options.save else BUILD
    (folder / "simulator_knee.png").write_bytes(knee_chart(queues).png())
    study.save({"queues": [queue._asdict() for queue in queues]})


if __name__ == "__main__":
    main()
