"""Speed of the simulator: a million requests over a hundred replicas on one core, every step by the real scheduler.

    python benchmarks simulator_speed --output-mean 64 256 --save

Lengths are lognormal, prompts of 128 tokens on average. Poisson arrivals go to the least loaded replica of an 8B
model on an H200, by its data sheet.
"""

from __future__ import annotations

import argparse
import gc
import time

from common.study import Study, show
from tidewheel.cli.simulate import add_arguments
from tidewheel.cli.simulation import scenario_of


def measure(arguments: argparse.Namespace, output_mean: float) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = [
        "--requests", str(arguments.requests), "--replicas", str(arguments.replicas),
        "--prompt", "lognormal:128:1:2048", "--output", f"lognormal:{output_mean:g}:1:2048",
        "--load", str(arguments.load), "--router", "least-loaded",
        "--set", f"enable_prefix_caching={str(arguments.prefix_caching).lower()}",
    ]  # fmt: skip
    scenario = scenario_of(parser.parse_args(options))
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
    ttft = sorted(outcomes.ttft[outcomes.finished])
    return {
        "requests": scenario.num_requests,
        "replicas": scenario.num_replicas,
        "output_mean": output_mean,
        "wall_s": round(wall, 1),
        "cpu_s": round(cpu, 1),
        "steps": steps,
        "rows_per_step": round(float(outcomes.output_tokens.sum()) / steps, 1),
        "tokens": tokens,
        "us_per_step": round(1e6 * cpu / steps, 1),
        "us_per_request": round(1e6 * cpu / scenario.num_requests, 1),
        "requests_per_s": round(scenario.num_requests / wall),  # of real time
        "simulated_s": round(outcomes.span, 1),
        "finished": len(ttft),
        "ttft_p99_s": round(ttft[int(0.99 * len(ttft))], 4),
    }


def main() -> None:
    study = Study("simulator_speed", __doc__, "numpy")
    study.add_argument("--requests", type=int, default=1_000_000)
    study.add_argument("--replicas", type=int, default=100)
    study.add_argument("--load", type=float, default=0.8, help="share of the capacity (default: %(default)g)")
    study.add_argument("--output-mean", type=float, nargs="+", default=[64.0], metavar="TOKENS")
    study.add_argument("--prefix-caching", action="store_true")
    study.add_argument("--name", default="simulator_speed", help="of the record (default: %(default)s)")
    arguments = study.begin()
    runs = [measure(arguments, output_mean) for output_mean in arguments.output_mean]
    show(runs)
    study.save({"load": arguments.load, "runs": runs}, arguments.name)


if __name__ == "__main__":
    main()
