"""Host time of scheduling: `schedule` + `apply` of the real Scheduler, with free tokens.

    python benchmarks/scheduler_cost.py --running 256 4096 [--policy priority fair] [--finished 0 20000] [--json]

In steady decoding with prefix caching, each step gives every row a token, and allocates, hashes and registers blocks
for one row in `block_size`, as rows stand at different places. `--finished N` first runs N requests to their end: the
cost must not depend on them. `--save` records the results.

    python benchmarks/scheduler_cost.py --against DIR [--rounds 5] …

compares with another checkout, such as a git worktree of an older commit, in processes that take turns, so machine
drift hits both. Figures are medians of rounds; a ratio below 1 means this checkout is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import record
from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import Request
from tidewheel.sampling import SamplingParams
from tidewheel.scheduler.policy import POLICIES
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.scheduler.scheduler_config import SchedulerConfig

BLOCK_SIZE = 16
MEAN_PROMPT_TOKENS = 128
EOS_IDS = (1, 2)
VOCAB_SIZE = 32_000
WARM_UP_STEPS = 200
NUM_TENANTS = 16


@dataclass(frozen=True, slots=True)
class Cost:
    running: int
    policy: str
    finished: int
    steps: int
    median_us: float
    p99_us: float
    schedule_us: float  # medians of the two halves
    apply_us: float


class Bench:
    def __init__(self, running: int, steps: int, policy: str, seed: int = 0) -> None:
        self.running = running
        self.policy = policy
        self.steps = steps
        self.rng = np.random.default_rng(seed)
        max_model_len = 2 * MEAN_PROMPT_TOKENS + WARM_UP_STEPS + steps + 1024
        config = SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=max(8192, 2 * running),
            max_model_len=max_model_len,
            max_waiting_requests=running,
            max_waiting_tokens=running * max_model_len,
            policy=policy,
        )
        num_blocks = running * (max_model_len // BLOCK_SIZE + 1)
        self.scheduler = Scheduler(config, KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True))
        self.num_added = 0

    def add(self, max_tokens: int) -> None:
        length = int(self.rng.integers(1, 2 * MEAN_PROMPT_TOKENS))
        prompt = self.rng.integers(3, VOCAB_SIZE, length, dtype=np.int32)
        request = Request(
            f"request-{self.num_added}",
            prompt,
            SamplingParams(max_tokens=max_tokens),
            max_tokens=max_tokens,
            arrival_time=time.monotonic(),
            stop_token_ids=EOS_IDS,
            tenant=f"tenant-{self.num_added % NUM_TENANTS}",
        )
        self.num_added += 1
        self.scheduler.add(request, time.monotonic())

    def answer(self, batch: ScheduledBatch) -> SampledTokens:
        tokens = self.rng.integers(3, VOCAB_SIZE, len(batch.rows), dtype=np.int32)
        return SampledTokens(batch.step_id, np.where(batch.samples, tokens, SampledTokens.NOT_SAMPLED))

    def step(self) -> tuple[float, float]:
        """Return seconds in `schedule`, including deadlines, and in `apply`."""
        begin = time.perf_counter()
        self.scheduler.expire(begin)
        batch = self.scheduler.schedule(begin)
        scheduled = time.perf_counter()
        if batch is None:
            raise RuntimeError("nothing to schedule")
        sampled = self.answer(batch)
        answered = time.perf_counter()
        self.scheduler.apply(batch, sampled, answered)
        return scheduled - begin, time.perf_counter() - answered

    def run(self, finished: int) -> Cost:
        while self.num_added < finished:
            for _ in range(min(self.running, finished - self.num_added)):
                self.add(max_tokens=2)
            while self.scheduler.has_unfinished:
                self.step()
        for _ in range(self.running):
            self.add(max_tokens=self.steps + WARM_UP_STEPS + 1000)
        for _ in range(WARM_UP_STEPS):
            self.step()
        if self.scheduler.num_running != self.running:
            raise RuntimeError(f"{self.scheduler.num_running} of {self.running} requests are running")
        halves = np.array([self.step() for _ in range(self.steps)]) * 1e6
        self.scheduler.check_invariants()
        total = halves.sum(axis=1)
        return Cost(
            running=self.running,
            policy=self.policy,
            finished=finished,
            steps=self.steps,
            median_us=round(statistics.median(total.tolist()), 1),
            p99_us=round(float(np.quantile(total, 0.99)), 1),
            schedule_us=round(float(np.median(halves[:, 0])), 1),
            apply_us=round(float(np.median(halves[:, 1])), 1),
        )


MEASURED = ("median_us", "p99_us", "schedule_us", "apply_us")
KEY = ("running", "policy", "finished")


def run_in(checkout: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--json", "--steps", str(options.steps)]
    for name in ("running", "finished", "policy"):
        command += [f"--{name}", *map(str, getattr(options, name))]
    packages = os.pathsep.join(str(checkout / name) for name in ("backend", "kernels", "client"))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": packages}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the run in {checkout} failed:\n{done.stderr}")
    costs: list[dict[str, Any]] = json.loads(done.stdout)
    return costs


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    sides = {"this": record.ROOT, "against": options.against.resolve()}
    rounds: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in sides}
    for number in range(options.rounds):
        for side in sorted(sides, reverse=number % 2 == 0):  # alternates which goes first
            rounds[side].append(run_in(sides[side], options))
    return [
        compare_case({side: [costs[index] for costs in rounds[side]] for side in sides})
        for index in range(len(rounds["this"][0]))
    ]


def compare_case(samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    case: dict[str, Any] = {name: samples["this"][0][name] for name in KEY}
    for name in MEASURED:
        figures = {side: record.summary([cost[name] for cost in costs]) for side, costs in samples.items()}
        ratio = figures["this"]["median"] / figures["against"]["median"]
        case[name] = {**figures, "ratio": round(ratio, 3)}
    return case


def report_comparison(options: argparse.Namespace, environment: dict[str, Any]) -> None:
    cases = compare(options)
    if options.save:
        commits = {"this": commit_of(record.ROOT), "against": commit_of(options.against)}
        result = {"unit": "us", "rounds": options.rounds, "commits": commits, "cases": cases}
        record.save("scheduler_cost_comparison", {**environment, **result})
    if options.json:
        print(json.dumps(cases))
        return
    show(("running", "policy", "finished", "of a step", "against_us", "this_us", "ratio"))
    for case in cases:
        for name in MEASURED:
            figures = case[name]
            medians = [round(figures[side]["median"], 1) for side in ("against", "this")]
            show((*(case[key] for key in KEY), name, *medians, figures["ratio"]))


def show(values: Sequence[object]) -> None:
    print(" ".join(f"{value!s:>12}" for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of schedule + apply per step, in microseconds.")
    parser.add_argument("--running", type=int, nargs="+", default=[256, 4096], help="running requests")
    parser.add_argument("--finished", type=int, nargs="+", default=[0], help="requests that end first")
    parser.add_argument("--policy", nargs="+", default=["priority"], choices=list(POLICIES))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, to be compared with this one")
    parser.add_argument("--rounds", type=int, default=5, help="of a comparison (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="machine readable, one list")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/scheduler_cost.json, or …_comparison.json"
    )
    options = parser.parse_args()
    environment = record.environment("numpy")
    if options.against is not None:
        report_comparison(options, environment)
        return
    costs = [
        Bench(running, options.steps, policy).run(finished)
        for policy in options.policy
        for finished in options.finished
        for running in options.running
    ]
    if options.save:
        record.save("scheduler_cost", {**environment, "unit": "us", "costs": [asdict(cost) for cost in costs]})
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs]))
        return
    print(f"python {platform.python_version()}, numpy {np.__version__}, {platform.processor() or platform.machine()}")
    columns = ("running", "policy", "finished", "steps", "median_us", "p99_us", "schedule_us", "apply_us")
    show(columns)
    for cost in costs:
        show([asdict(cost)[name] for name in columns])


if __name__ == "__main__":
    main()
