"""Speed of the simulator: a million requests over a hundred replicas on one core, every step by the real scheduler.

    python benchmarks/simulator_speed.py [--requests 1000000] [--replicas 100] [--output-mean 64 256] [--save [NAME]]

Prompts average 128 tokens and outputs 64, both lognormal; arrivals are Poisson at 80 % of the capacity, to the least
loaded replica of an 8B model on an H200, by its data sheet. Prompts share nothing, so prefix caching needs
`--prefix-caching`. `--output-mean` takes several values: longer outputs take more steps.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import asdict, dataclass

import record
from tidewheel.cli.simulate import add_arguments
from tidewheel.cli.simulation import scenario_of
from tidewheel.simulate.outcomes import FINISHED


@dataclass(frozen=True, slots=True)
class Run:
    requests: int
    replicas: int
    output_mean: float
    wall_s: float
    cpu_s: float
    steps: int
    rows_per_step: float
    tokens: int
    us_per_step: float  # of processor time
    us_per_request: float
    requests_per_s: float  # simulated, by wall clock
    simulated_s: float
    finished: int
    ttft_p99_s: float


def options(arguments: argparse.Namespace, output_mean: float) -> list[str]:
    return [
        "--requests", str(arguments.requests), "--replicas", str(arguments.replicas),
        "--prompt", "lognormal:128:1:2048", "--output", f"lognormal:{output_mean:g}:1:2048",
        "--load", str(arguments.load), "--router", "least-loaded",
        "--set", f"enable_prefix_caching={str(arguments.prefix_caching).lower()}",
    ]  # fmt: skip


def measure(arguments: argparse.Namespace, output_mean: float) -> Run:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    scenario = scenario_of(parser.parse_args(options(arguments, output_mean)))
    (policy,) = scenario.policies
    rate = arguments.load * scenario.capacity(policy) * scenario.num_replicas
    simulator = scenario.simulator(scenario.config(policy), scenario.trace(rate), scenario.num_replicas)
    gc.collect()
    gc.freeze()
    wall, cpu = time.perf_counter(), time.process_time()
    outcomes = simulator.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    steps = sum(replica.num_steps for replica in simulator.replicas)
    tokens = sum(replica.num_tokens for replica in simulator.replicas)
    return Run(
        requests=scenario.num_requests,
        replicas=scenario.num_replicas,
        output_mean=output_mean,
        wall_s=round(wall, 1),
        cpu_s=round(cpu, 1),
        steps=steps,
        rows_per_step=round(float(outcomes.output_tokens.sum()) / steps, 1),
        tokens=tokens,
        us_per_step=round(1e6 * cpu / steps, 1),
        us_per_request=round(1e6 * cpu / scenario.num_requests, 1),
        requests_per_s=round(scenario.num_requests / wall),
        simulated_s=round(outcomes.span, 1),
        finished=int((outcomes.ends == FINISHED).sum()),
        ttft_p99_s=round(sorted(outcomes.ttft[outcomes.finished])[int(0.99 * outcomes.finished.sum())], 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity (default: %(default)g)")
    parser.add_argument("--output-mean", type=float, nargs="+", default=[64.0], metavar="TOKENS")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument(
        "--save", nargs="?", const="simulator_speed", metavar="NAME", help="write benchmarks/results/NAME.json"
    )
    arguments = parser.parse_args()
    environment = record.environment("numpy")
    runs = []
    for output_mean in arguments.output_mean:
        runs.append(measure(arguments, output_mean))
        for name, value in asdict(runs[-1]).items():
            print(f"{name:16} {value}")
    if arguments.save:
        result = {**environment, "load": arguments.load, "runs": [asdict(run) for run in runs]}
        print(record.save(arguments.save, result))


if __name__ == "__main__":
    main()
