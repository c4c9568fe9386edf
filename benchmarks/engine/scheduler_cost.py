"""Host time of scheduling: `schedule` + `apply` of the real Scheduler, with free tokens.

    python benchmarks scheduler_cost --running 256 4096 --save
    python benchmarks scheduler_cost --against DIR --save

In steady decoding with prefix caching, each step gives every row a token, and allocates, hashes and registers blocks
for one row in `block_size`. The cost must not depend on `--finished`, requests that ended before. `--against`
compares with another checkout, such as a git worktree of an older commit, in processes that take turns, and writes
scheduler_cost_comparison.json; a ratio below 1 means this checkout is faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from common.study import ROOT, Study, commit_of, in_turns, run_in, show, summary
from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import Request
from tidewheel.sampling import SamplingParams
from tidewheel.scheduler.policy import POLICIES
from tidewheel.scheduler.scheduler import Scheduler, SchedulerConfig  # older checkouts have it in another file

BLOCK_SIZE = 16
MEAN_PROMPT_TOKENS = 128
EOS_IDS = (1, 2)
VOCAB_SIZE = 32_000
WARM_UP_STEPS = 200
NUM_TENANTS = 16


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
        self.scheduler.add_group([request], time.monotonic())

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

    def run(self, finished: int) -> dict[str, Any]:
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
        total = halves.sum(axis=1)
        schedule_us, apply_us = np.median(halves, axis=0).tolist()
        return {
            "running": self.running,
            "policy": self.policy,
            "finished": finished,
            "steps": self.steps,
            "median_us": round(statistics.median(total.tolist()), 1),
            "p99_us": round(float(np.quantile(total, 0.99)), 1),
            "schedule_us": round(schedule_us, 1),
            "apply_us": round(apply_us, 1),
        }


MEASURED = ("median_us", "p99_us", "schedule_us", "apply_us")
KEY = ("running", "policy", "finished")


def costs_in(checkout: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    command = ["scheduler_cost", "--json", "--steps", str(options.steps)]
    for name in ("running", "finished", "policy"):
        command += [f"--{name}", *map(str, getattr(options, name))]
    costs: list[dict[str, Any]] = run_in(checkout, command)
    return costs


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    runs = {"against": lambda: costs_in(options.against.resolve(), options), "this": lambda: costs_in(ROOT, options)}
    rounds = in_turns(runs, options.rounds, warm_up=0)
    return [
        compare_case({side: [costs[index] for costs in rounds[side]] for side in runs})
        for index in range(len(rounds["this"][0]))
    ]


def compare_case(samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    case: dict[str, Any] = {name: samples["this"][0][name] for name in KEY}
    for name in MEASURED:
        figures = {side: summary([cost[name] for cost in costs]) for side, costs in samples.items()}
        ratio = figures["this"]["median"] / figures["against"]["median"]
        case[name] = {**figures, "ratio": round(ratio, 3)}
    return case


def rows_of(case: dict[str, Any]) -> list[dict[str, object]]:
    rows = []
    for name in MEASURED:
        medians = {f"{side}_us": round(case[name][side]["median"], 1) for side in ("against", "this")}
        rows.append({**{key: case[key] for key in KEY}, "of a step": name, **medians, "ratio": case[name]["ratio"]})
    return rows


def main() -> None:
    study = Study("scheduler_cost", __doc__, "numpy")
    study.add_argument("--running", type=int, nargs="+", default=[256, 4096], help="running requests")
    study.add_argument("--finished", type=int, nargs="+", default=[0], help="requests that end first")
    study.add_argument("--policy", nargs="+", default=["priority"], choices=list(POLICIES))
    study.add_argument("--steps", type=int, default=2000)
    study.add_argument("--against", type=Path, metavar="DIR", help="another checkout, to be compared with this one")
    study.add_argument("--rounds", type=int, default=5, help="of a comparison (default: %(default)s)")
    study.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    options = study.begin()
    if options.against is not None:
        cases = compare(options)
        show(row for case in cases for row in rows_of(case))
        commits = {"this": commit_of(ROOT), "against": commit_of(options.against)}
        result = {"unit": "us", "rounds": options.rounds, "commits": commits, "cases": cases}
        study.save(result, "scheduler_cost_comparison")
        return
    cases = itertools.product(options.policy, options.finished, options.running)
    costs = [Bench(running, options.steps, policy).run(finished) for policy, finished, running in cases]
    if options.json:
        print(json.dumps(costs))
        return
    show(costs)
    study.save({"unit": "us", "costs": costs})


if __name__ == "__main__":
    main()
