"""What stands around a loaded runner: the facts that front ends learn about it, and a scheduler that fits it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Protocol

from tidewheel.config import EngineConfig
from tidewheel.engine.messages import EngineInfo
from tidewheel.engine.runner import Runner
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.runner.info import RunnerInfo
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.scheduler import Scheduler

Progress = Callable[[str, float], None]  # name of the stage, fraction of it that is done


class LoadedRunner(Runner, Protocol):
    @property
    def info(self) -> RunnerInfo: ...


LoadRunner = Callable[[EngineConfig, Progress], LoadedRunner]


def load_model_runner(config: EngineConfig, progress: Progress | None = None) -> LoadedRunner:
    """The real one. Imports torch, which takes seconds: nothing before it waits for that."""
    from tidewheel.runner.model_runner import ModelRunner

    return ModelRunner.load(config, progress)


def engine_info(runner: RunnerInfo, config: EngineConfig) -> EngineInfo:
    facts = dataclasses.asdict(runner)
    return EngineInfo(pid=os.getpid(), enable_prefix_caching=config.enable_prefix_caching, **facts)


def build_scheduler(config: EngineConfig, info: EngineInfo) -> Scheduler:
    kv = KVCacheManager(info.num_blocks, info.block_size, enable_prefix_caching=config.enable_prefix_caching)
    limits = SchedulerConfig(
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        policy=config.scheduling_policy,
    )
    return Scheduler(limits, kv)
