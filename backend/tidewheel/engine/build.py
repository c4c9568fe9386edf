import atexit
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from tidewheel.config import SIZED, EngineConfig, SchedulingSettings
from tidewheel.engine.core import Runner
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.kvcache.sessions import SessionLimits
from tidewheel.one_shot.runner import IterativeRunner, OneShotRunner, RemoteRunner
from tidewheel.record.recorder import BUFFER_BYTES, Recorder, RecordingScheduler
from tidewheel.runner.info import RunnerInfo
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.tenants import parse_tenants

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]  # stage, completed fraction

_recordings = itertools.count()


class LoadedRunner(Runner, Protocol):
    @property
    def info(self) -> RunnerInfo: ...


@runtime_checkable
class RankedRunner(LoadedRunner, Protocol):
    """Runner of several processes."""

    @property
    def ranks(self) -> list[tuple[int, str]]:
        """Return the process id and device of each."""

    def check(self) -> None:
        """Raise `InternalError` if one of them has ended."""

    def close(self) -> None:
        """End the processes other than this one."""


LoadRunner = Callable[[EngineConfig, Progress], LoadedRunner]


def load_model_runner(config: EngineConfig, progress: Progress | None = None) -> LoadedRunner:
    """Load the model. Imports torch here, because that takes seconds."""
    if config.kind != "text":
        if progress is not None:
            progress("load", 0.0)
        one_shot = RemoteRunner if config.is_remote else OneShotRunner
        return (IterativeRunner if config.kind == "iterative" else one_shot).load(config)
    if config.tensor_parallel_size > 1:
        from tidewheel.runner.rank_group import load_group

        return load_group(config, progress)
    from tidewheel.runner.model_runner import ModelRunner

    return ModelRunner.load(config, progress)


def engine_info(runner: RunnerInfo, config: EngineConfig) -> EngineInfo:
    info = EngineInfo(
        pid=os.getpid(),
        enable_prefix_caching=config.enable_prefix_caching,
        max_logprobs=config.max_logprobs,
        async_scheduling=is_async(config, runner.device),
        tenants=parse_tenants(config.tenants),
        **msgspec.structs.asdict(runner),
    )
    for line in info.describe():
        log.log(logging.WARNING if line == info.shortened else logging.INFO, "%s", line)
    return info


def is_async(config: EngineConfig, device: str) -> bool:
    """Return whether to launch a step while the previous step runs, which gains nothing on a CPU."""
    return not device.startswith("cpu") if config.async_scheduling is None else config.async_scheduling


def build_scheduler(config: EngineConfig, info: EngineInfo, clock: Callable[[], float] = lambda: 0.0) -> Scheduler:
    """Raise as `scheduler_config`, or `ConfigError` for an unwritable `record`."""
    settings = scheduler_config(config, info)
    kv = KVCacheManager(
        info.num_blocks,
        info.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=info.num_host_blocks,
        session_limits=session_limits(config),
    )
    if config.record:
        return RecordingScheduler(settings, kv, open_recorder(config, info), clock)
    return Scheduler(settings, kv)


def session_limits(config: EngineConfig) -> SessionLimits:
    return SessionLimits(config.max_sessions, config.session_max_blocks, parse_tenants(config.tenants))


def scheduler_config(config: EngineConfig, info: EngineInfo) -> SchedulerConfig:
    """Raise `ConfigError` for a quota above the cache's blocks."""
    tenants = parse_tenants(config.tenants)
    quotas = {f"tenants.{name}: max_blocks": limits.max_blocks for name, limits in tenants.items()}
    quotas["session_max_blocks"] = config.session_max_blocks
    for name, quota in quotas.items():
        if quota is not None and quota > info.num_blocks:
            raise ConfigError(f"{name} is {quota}: the KV cache has {info.num_blocks} blocks; lower it or remove it")
    shared: dict[str, Any] = {f.name: getattr(config, f.name) for f in dataclasses.fields(SchedulingSettings)}
    shared |= {name: min(shared[name], getattr(info, name)) for name in SIZED}
    shared["batch_size"] = config.batch_size or shared["max_num_seqs"]
    return SchedulerConfig(
        **shared,
        max_model_len=info.max_model_len,
        max_inflight_steps=info.num_blocks if config.is_remote else 1 + info.async_scheduling,
        policy=config.scheduling_policy,
        least_cut_tokens=16 if config.kind == "text" else 1,
        takes_turns=config.kind == "iterative",
        has_quantized_copy=config.pressure_quantization != "none",
        tenants=tenants,
        max_loras=config.max_loras if config.enable_lora else 0,
        lora_limits=parse_tenants(config.lora_limits, "lora_limits"),
        swap_seconds_per_block=info.swap_seconds_per_block,
        speculation=config.speculation,
        num_speculative_tokens=config.num_speculative_tokens,
        decode_seconds=info.decode_seconds,
    )


def check_record_folder(config: EngineConfig) -> None:
    folder = Path(config.record)
    if not config.record:
        return
    if not folder.is_dir():
        raise ConfigError(f"record is {config.record!r}: there is no folder {folder.resolve()}; make it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"record is {config.record!r}: the folder cannot be written")


def open_recorder(config: EngineConfig, info: EngineInfo) -> Recorder:
    check_record_folder(config)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = Path(config.record) / f"{stamp}-{os.getpid()}-{next(_recordings)}.jsonl"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"record is {config.record!r}: {error}") from None
    recorder = Recorder(
        os.fdopen(descriptor, "wb", buffering=BUFFER_BYTES),
        settings=config.to_settings(),
        info=msgspec.to_builtins(info),
        with_contents=config.enable_prefix_caching,
        named_tenants=(*parse_tenants(config.tenants), *parse_tenants(config.lora_limits, "lora_limits")),
    )
    atexit.register(recorder.flush)
    return recorder
