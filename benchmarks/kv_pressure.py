"""Preemptions and recomputed tokens with a KV cache smaller than its requests.

    python benchmarks/kv_pressure.py [--requests 400] [--pool 50] [--rate 60] [--seeds 3] [--growth on off] [--save]

The scheduler runs under the simulator's clock (an 8B model on an H200, by its data sheet). The pool holds `--pool`
mean requests and `--rows` may run; output lengths vary widely and are hidden by one common `max_tokens`. Arrivals are
Poisson, several times as fast as ends.

A token is computed twice when a preempted request returns without its blocks. Figures by seed: preemptions per
request, tokens computed over needed, output tokens per second until the last end. `--growth off` admits by free
blocks alone (`admit_by_growth` false).
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass

import numpy as np

import record
from tidewheel.config import EngineConfig
from tidewheel.scheduler.policy import POLICIES
from tidewheel.simulate.cost_model import H200_8B
from tidewheel.simulate.outcomes import Outcomes
from tidewheel.simulate.replica import Replica
from tidewheel.simulate.scenario import simulated_info, simulator_of
from tidewheel.workload.arrival_times import poisson_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import Trace, synthesise

BLOCK_SIZE = 16
MAX_PREEMPTIONS, MAX_TOKENS_RATIO = 0.10, 1.05  # goals: per request, and computed over needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    requests: int
    pool: int  # mean requests that fit
    rows: int
    prompt: str
    output: str
    rate: float

    def lengths(self) -> tuple[Lengths, Lengths]:
        return Lengths.parse(self.prompt, name="--prompt"), Lengths.parse(self.output, name="--output")

    def trace(self, seed: int) -> Trace:
        rng = np.random.default_rng(seed)
        return synthesise(poisson_arrivals(self.requests, self.rate, rng), *self.lengths(), rng)

    @property
    def num_blocks(self) -> int:
        prompt, output = self.lengths()
        return round(self.pool * (prompt.mean + output.mean) / BLOCK_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    output: str
    policy: str
    growth: str
    seed: int
    finished: int
    preemptions: int
    preemptions_per_request: float
    tokens_over_needed: float
    mean_rows: float
    output_tokens_per_s: float
    mean_latency_s: float
    p99_ttft_s: float


def simulate(load: Load, policy: str, growth: str, trace: Trace) -> tuple[Outcomes, Replica]:
    config = EngineConfig(
        model="simulated", max_num_seqs=load.rows, num_blocks=load.num_blocks, block_size=BLOCK_SIZE,
        scheduling_policy=policy, admit_by_growth=growth == "on",
    )  # fmt: skip
    info = simulated_info(config, H200_8B, max_model_len=trace.max_num_tokens)
    simulator = simulator_of(config, info, trace, H200_8B)
    return simulator.run(), simulator.replicas[0]


def measure(load: Load, policy: str, growth: str, seed: int) -> Figures:
    trace = load.trace(seed)
    outcomes, replica = simulate(load, policy, growth, trace)
    finished = outcomes.finished
    needed = int((trace.prompt_tokens + trace.output_tokens - 1)[finished].sum())  # the last token is never fed back
    return Figures(
        output=load.output,
        policy=policy,
        growth=growth,
        seed=seed,
        finished=int(finished.sum()),
        preemptions=int(outcomes.preemptions.sum()),
        preemptions_per_request=round(float(outcomes.preemptions.sum()) / load.requests, 3),
        tokens_over_needed=round(replica.num_tokens / needed, 3),
        mean_rows=round(float(outcomes.output_tokens.sum()) / replica.num_steps, 1),
        output_tokens_per_s=round(float(outcomes.output_tokens.sum()) / outcomes.span, 1),
        mean_latency_s=round(float(np.nanmean(outcomes.latency)), 3),
        p99_ttft_s=round(float(np.nanquantile(outcomes.ttft, 0.99)), 3),
    )


def summary(runs: list[Figures]) -> str:
    preemptions, ratio, tokens = (
        statistics.mean(getattr(run, name) for run in runs)
        for name in ("preemptions_per_request", "tokens_over_needed", "output_tokens_per_s")
    )
    return (
        f"{runs[0].output}, {runs[0].policy}, growth {runs[0].growth}: "
        f"{preemptions:.2f} preemptions a request (goal {MAX_PREEMPTIONS}), "
        f"{ratio:.2f} times the tokens needed (goal {MAX_TOKENS_RATIO}), {tokens:.0f} output tokens a second"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--pool", type=int, default=50, help="requests of mean size that the pool holds")
    parser.add_argument("--rows", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--prompt", default="uniform:60", metavar="SPEC")
    parser.add_argument("--output", nargs="+", default=["uniform:700", "lognormal:700:0.6:2800"], metavar="SPEC")
    parser.add_argument("--rate", type=float, default=60.0, help="arrivals per second (default: %(default)g)")
    parser.add_argument("--policy", nargs="+", default=["priority"], choices=list(POLICIES))
    parser.add_argument("--growth", nargs="+", default=["on", "off"], choices=["on", "off"])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each policy")
    parser.add_argument("--json", action="store_true", help="machine readable, one list")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/kv_pressure.json")
    options = parser.parse_args()
    names = ("requests", "pool", "rows", "prompt", "rate")
    loads = [Load(output=output, **{name: getattr(options, name) for name in names}) for output in options.output]
    environment = record.environment("numpy")
    cases = [(load, policy, growth) for load in loads for policy in options.policy for growth in options.growth]
    figures = [measure(*case, seed) for case in cases for seed in range(options.seeds)]
    if options.save:
        result = {"loads": [asdict(load) for load in loads], "runs": [asdict(run) for run in figures]}
        record.save("kv_pressure", {**environment, **result})
    if options.json:
        print(json.dumps([asdict(run) for run in figures]))
        return
    for run in figures:
        print("  ".join(f"{name} {value}" for name, value in asdict(run).items()))
    for load, *case in cases:
        print(summary([run for run in figures if [run.output, run.policy, run.growth] == [load.output, *case]]))


if __name__ == "__main__":
    main()
