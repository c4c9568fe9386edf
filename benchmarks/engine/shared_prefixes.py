"""Savings of the prefix cache on shared beginnings: cache-aware order, and bursts.

    python benchmarks shared_prefixes --engine --save

*Conversations*: 64, each with one of 8 system prompts and several turns, which repeat the conversation. More wait
than can run, and the KV cache holds little beyond the running ones. `arrival` serves in order of arrival (`fifo`),
`cache` the longest cached prefix first (`cache_aware_order`).

*Bursts*: 32 requests with a common prefix and separate tails arrive at once while others decode. The figure is prompt
tokens computed over distinct ones, 1 at best.

All on a modelled clock (an 8B model on an H200, by its data sheet), and with `--engine` also on a small random model.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.clocks import Clock, ManualClock, WallClock
from common.engine_runs import FIRST_ID, GREEDY, EngineLoop
from common.random_model import make_model
from common.study import Study, show
from modelled.roofline import SHAPES
from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler, engine_info, load_model_runner
from tidewheel.engine.core import Runner
from tidewheel.engine.messages import EngineInfo
from tidewheel.record.recorded_events import step_features
from tidewheel.request import FinishReason, Request
from tidewheel.simulate.cost_model import H200_8B
from tidewheel.simulate.scenario import simulated_info

GOAL_HIT_RATIO = 1.3  # of the hit rate by arrival
BLOCK_SIZE = 16
VOCAB_SIZE = 512
MAX_MODEL_LEN = 2048
ORDERS: dict[str, dict[str, object]] = {
    "arrival": {"scheduling_policy": "fifo"},
    "cache": {"scheduling_policy": "priority", "cache_aware_order": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    conversations: int = 64
    prefixes: int = 8
    prefix_tokens: int = 512
    turns: int = 5
    turn_tokens: int = 96  # of a question
    answer_tokens: int = 32
    think_s: float = 0.5  # from answer to question
    rows: int = 4

    @property
    def max_tokens(self) -> int:
        return self.prefix_tokens + self.turns * (self.turn_tokens + self.answer_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks for 1.5 times the longest turns in every row."""
        return round(1.5 * self.rows * self.max_tokens / BLOCK_SIZE)


CHATS = Chats()
QUICK_CHATS = Chats(think_s=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    bursts: int = 8
    requests: int = 32  # of a burst
    prefix_tokens: int = 512
    longest_tail: int = 96
    decoding: int = 16
    gap_s: float = 0.5


Figures = dict[str, Any]


class ModelledStep(NamedTuple):
    clock: ManualClock
    sampled: SampledTokens
    end: float
    is_done: None = None

    def wait(self) -> SampledTokens:
        self.clock.wait_until(self.end)
        return self.sampled


class ModelledRunner:
    def __init__(self, clock: ManualClock, seed: int) -> None:
        self._clock = clock
        self._rng = np.random.default_rng(seed)
        self._free_at = 0.0

    def launch(self, batch: ScheduledBatch) -> ModelledStep:
        self._free_at = max(self._free_at, self._clock()) + H200_8B.step_seconds(step_features(batch))
        tokens = self._rng.integers(FIRST_ID, VOCAB_SIZE, len(batch.rows), dtype=np.int32)
        sampled = np.where(batch.samples, tokens, np.int32(SampledTokens.NOT_SAMPLED))
        return ModelledStep(self._clock, SampledTokens(batch.step_id, sampled), self._free_at)


class Place(NamedTuple):
    name: str
    runner: Runner
    info: EngineInfo
    clock: Clock


MakePlace = Callable[[EngineConfig, int], Place]


def modelled(config: EngineConfig, seed: int) -> Place:
    clock = ManualClock(1.0)
    info = simulated_info(config, H200_8B, max_model_len=MAX_MODEL_LEN)
    return Place("modelled", ModelledRunner(clock, seed), info, clock)


@contextmanager
def small_model() -> Iterator[MakePlace]:
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        make_model(Path(folder), SHAPES["tiny"], torch.float32)

        def make(config: EngineConfig, _seed: int) -> Place:
            config = dataclasses.replace(config, model=folder, dtype="float32", max_model_len=MAX_MODEL_LEN)
            runner = load_model_runner(config)
            return Place("engine", runner, engine_info(runner.info, config), WallClock())

        yield make


class Player:
    def __init__(self, place: Place, config: EngineConfig) -> None:
        self._where = place.name
        self._scheduler = build_scheduler(config, place.info)
        self.loop = EngineLoop(self._scheduler, place.runner, place.clock)
        self.clock = place.clock

    def ask(self, prompt: list[int], max_tokens: int, moment: float) -> Request:
        ids = np.array(prompt, dtype=np.int32)
        name = str(len(self.loop.requests))
        request = Request(name, ids, GREEDY, max_tokens=max_tokens, arrival_time=moment)
        self.loop.send(request)
        return request

    def figures(self, load: str, order: str, seed: int, num_distinct: int) -> Figures:
        """Run all; raise RuntimeError for a request without its tokens."""
        self.loop.run()
        requests = self.loop.requests
        for request in requests:
            if request.finish_reason is not FinishReason.LENGTH:
                raise RuntimeError(f"{request} ended with {request.finish_reason}: {request.error}")
        stats = self._scheduler.stats()
        queries, hits = stats.num_prefix_queries, stats.num_prefix_hits
        begin = min(request.arrival_time for request in requests)
        starts = [(request.first_scheduled_time or 0.0) - request.arrival_time for request in requests]
        ttfts = [(request.first_token_time or 0.0) - request.arrival_time for request in requests]
        return {
            "load": load,
            "where": self._where,
            "order": order,
            "seed": seed,
            "prompt_tokens": queries,
            "hit_tokens": hits,
            "hit_rate": round(hits / queries, 4),
            "computed_over_distinct": round((queries - hits) / num_distinct, 3),
            "preemptions": stats.num_preemptions,
            "seconds": round(max(request.last_token_time or 0.0 for request in requests) - begin, 2),
            "mean_ttft_s": round(statistics.mean(ttfts), 3),
            "max_queue_s": round(max(starts), 3),
        }


def words(chance: random.Random, number: int) -> list[int]:
    return chance.choices(range(FIRST_ID, VOCAB_SIZE), k=number)


def converse(make_place: MakePlace, order: str, seed: int, chats: Chats) -> Figures:
    config = EngineConfig(
        model="none", max_num_seqs=chats.rows, num_blocks=chats.num_blocks, block_size=BLOCK_SIZE, ageing_s=60.0,
        **ORDERS[order],
    )  # fmt: skip
    chance = random.Random(seed)
    player = Player(make_place(config, seed), config)
    prefixes = [words(chance, chats.prefix_tokens) for _ in range(chats.prefixes)]
    left: dict[str, int] = {}  # turns left, by latest request

    def ask(prompt: list[int], turns: int, moment: float) -> None:
        request = player.ask(prompt + words(chance, chats.turn_tokens), chats.answer_tokens, moment)
        left[request.request_id] = turns - 1

    def go_on(request: Request) -> None:
        turns = left.pop(request.request_id)
        if turns:
            said = [*request.prompt_token_ids.tolist(), *request.output_token_ids]
            ask(said, turns, player.clock() + chats.think_s)

    player.loop.on_end = go_on
    begin = player.clock()
    places = chance.sample(range(chats.conversations), chats.conversations)
    for number, place in enumerate(places):
        ask(prefixes[place % chats.prefixes], chats.turns, begin + 1e-3 * number)
    asked = chats.conversations * chats.turns * chats.turn_tokens  # answers are cached
    num_distinct = chats.prefixes * chats.prefix_tokens + asked
    return player.figures("conversations", order, seed, num_distinct)


def burst(make_place: MakePlace, order: str, seed: int, bursts: Bursts) -> Figures:
    config = EngineConfig(model="none", max_num_seqs=64, num_blocks=4096, block_size=BLOCK_SIZE, **ORDERS[order])
    chance = random.Random(seed)
    player = Player(make_place(config, seed), config)
    begin, num_distinct = player.clock(), 0
    for _ in range(bursts.decoding):
        player.ask(words(chance, 32), 512, begin)
        num_distinct += 32
    for number in range(bursts.bursts):
        prefix = words(chance, bursts.prefix_tokens)
        num_distinct += len(prefix)
        for _ in range(bursts.requests):
            tail = words(chance, chance.randint(1, bursts.longest_tail))
            num_distinct += len(tail)
            player.ask(prefix + tail, 4, begin + bursts.gap_s * (number + 1))
    return player.figures("bursts", order, seed, num_distinct)


def measure(make_place: MakePlace, chats: Chats, options: argparse.Namespace) -> Iterator[Figures]:
    for seed in range(options.seeds):
        for order in options.order:
            yield converse(make_place, order, seed, chats)
        yield burst(make_place, options.order[-1], seed, Bursts())


def mean(runs: list[Figures], name: str) -> float:
    return statistics.mean(run[name] for run in runs)


def summary(runs: list[Figures]) -> Iterator[str]:
    where = runs[0]["where"]
    chats = {
        order: [run for run in runs if (run["load"], run["order"]) == ("conversations", order)] for order in ORDERS
    }
    for order, found in chats.items():
        if found:
            yield f"{where}, {order} order: hit rate {mean(found, 'hit_rate'):.3f}"
    if all(chats.values()):
        ratio = mean(chats["cache"], "hit_rate") / mean(chats["arrival"], "hit_rate")
        yield f"{where}: {ratio:.2f} times the hit rate of arrival order (goal {GOAL_HIT_RATIO})"
    computed = mean([run for run in runs if run["load"] == "bursts"], "computed_over_distinct")
    yield f"{where}, bursts: {computed:.3f} prompt tokens computed for each distinct one"


def main() -> None:
    study = Study("shared_prefixes", __doc__, "numpy", "torch")
    study.add_argument("--order", nargs="+", default=list(ORDERS), choices=list(ORDERS))
    study.add_argument("--engine", action="store_true", help="also on a real model on this CPU")
    study.add_argument("--seeds", type=int, default=3, help="runs of each")
    options = study.begin()
    places = [list(measure(modelled, CHATS, options))]
    if options.engine:
        with small_model() as make_place:
            places.append(list(measure(make_place, QUICK_CHATS, options)))
    runs = [run for found in places for run in found]
    show(runs)
    for found in places:
        print(*summary(found), sep="\n")
    loads = {"modelled": asdict(CHATS), "engine": asdict(QUICK_CHATS), "bursts": asdict(Bursts())}
    study.save({"loads": loads, "runs": runs})


if __name__ == "__main__":
    main()
