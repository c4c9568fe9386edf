"""Preemptions and recomputed tokens with a KV cache smaller than its requests, under the simulator's clock.

    python benchmarks kv_pressure --save

The model is of 8B on an H200, by its data sheet. Requests arrive several times as fast as they end; output lengths
vary widely, and one common `max_tokens` hides them. A token is computed again when a preempted request returns
without its blocks. `--growth off` admits by free blocks alone (`admit_by_growth` false).
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from common.study import Study, show
from tidewheel.config import EngineConfig
from tidewheel.scheduler.policy import POLICIES
from tidewheel.simulate.cost_model import H200_8B
from tidewheel.simulate.scenario import simulated_info, simulator_of
from tidewheel.workload.arrivals import poisson_arrivals
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


Figures = dict[str, Any]


def measure(load: Load, policy: str, growth: str, seed: int) -> Figures:
    trace = load.trace(seed)
    config = EngineConfig(
        model="simulated", max_num_seqs=load.rows, num_blocks=load.num_blocks, block_size=BLOCK_SIZE,
        scheduling_policy=policy, admit_by_growth=growth == "on",
    )  # fmt: skip
    info = simulated_info(config, H200_8B, max_model_len=trace.max_num_tokens)
    simulator = simulator_of(config, info, trace, H200_8B)
    outcomes, (replica,) = simulator.run(), simulator.replicas
    finished = outcomes.finished
    needed = int((trace.prompt_tokens + trace.output_tokens - 1)[finished].sum())  # the last token is never fed back
    num_output = float(outcomes.output_tokens.sum())
    num_preempted = int(outcomes.preemptions.sum())
    return {
        "output": load.output,
        "policy": policy,
        "growth": growth,
        "seed": seed,
        "finished": int(finished.sum()),
        "preemptions": num_preempted,
        "preemptions_per_request": round(num_preempted / load.requests, 3),
        "tokens_over_needed": round(replica.num_tokens / needed, 3),
        "mean_rows": round(num_output / replica.num_steps, 1),
        "output_tokens_per_s": round(num_output / outcomes.span, 1),
        "mean_latency_s": round(float(np.nanmean(outcomes.latency)), 3),
        "p99_ttft_s": round(float(np.nanquantile(outcomes.ttft, 0.99)), 3),
    }


def summary(runs: list[Figures]) -> str:
    preemptions, ratio, tokens = (
        statistics.mean(run[name] for run in runs)
        for name in ("preemptions_per_request", "tokens_over_needed", "output_tokens_per_s")
    )
    return (
        f"{runs[0]['output']}, {runs[0]['policy']}, growth {runs[0]['growth']}: "
        f"{preemptions:.2f} preemptions a request (goal {MAX_PREEMPTIONS}), "
        f"{ratio:.2f} times the tokens needed (goal {MAX_TOKENS_RATIO}), {tokens:.0f} output tokens a second"
    )


def main() -> None:
    study = Study("kv_pressure", __doc__, "numpy")
    study.add_argument("--requests", type=int, default=400)
    study.add_argument("--pool", type=int, default=50, help="requests of mean size that the pool holds")
    study.add_argument("--rows", type=int, default=256, help="max_num_seqs")
    study.add_argument("--prompt", default="uniform:60", metavar="SPEC")
    study.add_argument("--output", nargs="+", default=["uniform:700", "lognormal:700:0.6:2800"], metavar="SPEC")
    study.add_argument("--rate", type=float, default=60.0, help="arrivals per second (default: %(default)g)")
    study.add_argument("--policy", nargs="+", default=["priority"], choices=list(POLICIES))
    study.add_argument("--growth", nargs="+", default=["on", "off"], choices=["on", "off"])
    study.add_argument("--seeds", type=int, default=3, help="runs of each policy")
    options = study.begin()
    names = ("requests", "pool", "rows", "prompt", "rate")
    loads = [Load(output=output, **{name: getattr(options, name) for name in names}) for output in options.output]
    cases = [(load, policy, growth) for load in loads for policy in options.policy for growth in options.growth]
    runs = [[measure(*case, seed) for seed in range(options.seeds)] for case in cases]
    figures = [run for of_case in runs for run in of_case]
    show(figures)
    print(*map(summary, runs), sep="\n")
    study.save({"loads": [asdict(load) for load in loads], "runs": figures})


if __name__ == "__main__":
    main()
