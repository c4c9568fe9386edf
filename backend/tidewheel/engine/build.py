from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Protocol

from tidewheel.config import EngineConfig
from tidewheel.engine.messages import EngineInfo
from tidewheel.engine.recording import open_recorder
from tidewheel.engine.runner import Runner
from tidewheel.errors import ConfigError
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.kvcache.sessions import SessionLimits
from tidewheel.record.recording_scheduler import RecordingScheduler
from tidewheel.runner.info import RunnerInfo
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.scheduler.strategy import StrategyConfig
from tidewheel.tenants import TenantLimits, parse_tenants

Progress = Callable[[str, float], None]  # stage and its completed fraction


class LoadedRunner(Runner, Protocol):
    @property
    def info(self) -> RunnerInfo: ...


LoadRunner = Callable[[EngineConfig, Progress], LoadedRunner]


def load_model_runner(config: EngineConfig, progress: Progress | None = None) -> LoadedRunner:
    """Load the real runner. Import torch only here, because that takes seconds."""
    from tidewheel.runner.model_runner import ModelRunner

    return ModelRunner.load(config, progress)


def engine_info(runner: RunnerInfo, config: EngineConfig) -> EngineInfo:
    return EngineInfo(
        pid=os.getpid(),
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=is_async(config, runner.device),
        tenants=parse_tenants(config.tenants),
        **dataclasses.asdict(runner),
    )


def is_async(config: EngineConfig, device: str) -> bool:
    """Return whether to launch steps ahead. On a CPU nothing overlaps, because a launch returns when its work is
    done, and a request that stops would waste a row.
    """
    return not device.startswith("cpu") if config.async_scheduling is None else config.async_scheduling


def build_scheduler(config: EngineConfig, info: EngineInfo) -> Scheduler:
    """Build the scheduler. Raise `ConfigError` if settings do not fit the model or cache, or `record` cannot be
    written.
    """
    tenants = parse_tenants(config.tenants)
    _check_quotas(config, tenants, info.num_blocks)
    settings = SchedulerConfig(
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        max_inflight_steps=2 if info.async_scheduling else 1,
        policy=config.scheduling_policy,
        ageing_s=config.ageing_s,
        cache_aware_order=config.cache_aware_order,
        admit_by_growth=config.admit_by_growth,
        tenants=tenants,
        predictor_prior_tokens=config.predictor_prior_tokens,
        breaker_error_rate=config.breaker_error_rate,
        breaker_queue_time_s=config.breaker_queue_time_s,
        preemption_mode=config.preemption_mode,
        max_preemptions=config.max_preemptions,
        swap_seconds_per_block=info.swap_seconds_per_block,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        strategy=StrategyConfig(
            name=config.scheduling_strategy,
            batch_size=config.batch_size or info.max_num_seqs,
            batch_timeout_s=1e-3 * config.batch_timeout_ms,
            target_latency_s=1e-3 * config.batch_target_latency_ms,
            hybrid_threshold=config.hybrid_threshold,
            hybrid_backlog=config.hybrid_backlog,
        ),
        target_tpot_s=_seconds(config.target_tpot_ms),
        enable_seqs_governor=config.enable_seqs_governor,
        governor_target_latency_s=_seconds(config.governor_target_latency_ms),
    )
    kv = KVCacheManager(
        info.num_blocks,
        info.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=info.num_host_blocks,
        session_limits=SessionLimits(config.max_sessions, config.session_max_blocks, tenants),
    )
    if config.record:
        return RecordingScheduler(settings, kv, open_recorder(config, info))
    return Scheduler(settings, kv)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else 1e-3 * milliseconds


def _check_quotas(config: EngineConfig, tenants: Mapping[str, TenantLimits], num_blocks: int) -> None:
    quotas = {f"tenants.{name}: max_blocks": limits.max_blocks for name, limits in tenants.items()}
    quotas["session_max_blocks"] = config.session_max_blocks
    for name, quota in quotas.items():
        if quota is not None and quota > num_blocks:
            raise ConfigError(f"{name} is {quota}: the KV cache has {num_blocks} blocks; lower it or remove it")
