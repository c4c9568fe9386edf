"""Scheduler and runner in one loop: the engine without processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from support.scheduler.invariants import check_invariants
from tidewheel.batch import Int32Array
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import Request
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.sampling import SamplingParams
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0)


def request(
    name: str, prompt: Int32Array, num_tokens: int, sampling: SamplingParams = GREEDY, **fields: object
) -> Request:
    return Request(name, prompt, sampling, max_tokens=num_tokens, arrival_time=0.0, **fields)


def poison(runner: ModelRunner) -> None:
    """Put NaN in every slot of the cache, so that a read of an unwritten slot shows in the tokens."""
    if runner.kv.blocks.dtype == torch.int8:
        runner.kv.blocks.fill_(-1)  # scales become NaN
        return
    for keys, values, _ in runner.kv.layers:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))


class StepLoop:
    """A scheduler over the blocks of a runner, both kept between calls of `run`."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_blocks: int | None = None,
        token_budget: int = 2048,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        **settings: Any,
    ) -> None:
        info = runner.info
        config = SchedulerConfig(
            max_num_seqs=info.max_num_seqs, max_num_batched_tokens=token_budget, max_model_len=info.max_model_len,
            max_waiting_requests=1024, max_waiting_tokens=1 << 20, watermark=0.0, admit_by_growth=False, **settings,
        )  # fmt: skip
        kv = KVCacheManager(
            num_blocks or info.num_blocks,
            info.block_size,
            enable_prefix_caching=prefix_caching,
            num_host_blocks=num_host_blocks,
        )
        self.scheduler = Scheduler(config, kv)
        self.runner = runner

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Run all requests to their end; return their tokens. Requests that name a leader form a group with it."""
        for leader in [item for item in requests if item.leader is None]:
            self.scheduler.add_group([leader, *(item for item in requests if item.leader is leader)], 0.0)
        now = 0.0
        while self.scheduler.has_unfinished:
            batch = self.scheduler.schedule(now)
            assert batch is not None, "requests are left, and nothing can run"
            self.scheduler.apply(batch, self.runner.run(batch), now)
            now += 1.0
        check_invariants(self.scheduler)
        return [item.output_token_ids for item in requests]
