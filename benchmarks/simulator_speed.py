"""Speed of the simulator: a million requests over a hundred replicas on one core, every step by the real scheduler.

    python benchmarks/simulator_speed.py [--requests 1000000] [--replicas 100] [--output-mean 64 256] [--save]

Prompts average 128 tokens and outputs 64, both lognormal; arrivals are Poisson at 80 % of the capacity, to the least
loaded replica of an 8B model on an H200, by its data sheet. Prompts share nothing, so prefix caching needs
`--prefix-caching`. `--output-mean` takes several values: longer outputs take more steps.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import asdict, dataclass

from study import Study, show
from tidewheel.cli.simulate import add_arguments
from tidewheel.cli.simulation import Plan, build_simulator, find_capacity
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
    plan = Plan.from_options(parser.parse_args(options(arguments, output_mean)))
    (policy,) = plan.policies
    rate = arguments.load * find_capacity(plan, policy) * plan.num_replicas
    simulator = build_simulator(plan, policy, plan.trace(rate))
    gc.collect()
    gc.freeze()
    wall, cpu = time.perf_counter(), time.process_time()
    outcomes = simulator.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    steps = sum(replica.num_steps for replica in simulator.replicas)
    tokens = sum(replica.num_tokens for replica in simulator.replicas)
    return Run(
        requests=plan.num_requests,
        replicas=plan.num_replicas,
        output_mean=output_mean,
        wall_s=round(wall, 1),
        cpu_s=round(cpu, 1),
        steps=steps,
        rows_per_step=round(float(outcomes.output_tokens.sum()) / steps, 1),
        tokens=tokens,
        us_per_step=round(1e6 * cpu / steps, 1),
        us_per_request=round(1e6 * cpu / plan.num_requests, 1),
        requests_per_s=round(plan.num_requests / wall),
        simulated_s=round(outcomes.span, 1),
        finished=int((outcomes.ends == FINISHED).sum()),
        ttft_p99_s=round(sorted(outcomes.ttft[outcomes.finished])[int(0.99 * outcomes.finished.sum())], 4),
    )


def main() -> None:
    study = Study("simulator_speed", __doc__, "numpy")
    study.add_argument("--requests", type=int, default=1_000_000)
    study.add_argument("--replicas", type=int, default=100)
    study.add_argument("--load", type=float, default=0.8, help="share of the capacity (default: %(default)g)")
    study.add_argument("--output-mean", type=float, nargs="+", default=[64.0], metavar="TOKENS")
    study.add_argument("--prefix-caching", action="store_true")
    study.add_argument("--name", default="simulator_speed", help="of the record (default: %(default)s)")
    arguments = study.begin()
    runs = [asdict(measure(arguments, output_mean)) for output_mean in arguments.output_mean]
    show(runs)
    study.save({"load": arguments.load, "runs": runs}, arguments.name)


if __name__ == "__main__":
    main()
