"""Recordings of an engine: opened when it is built, and read back into the scheduler that it had."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from pathlib import Path

import msgspec

from tidewheel.config import EngineConfig
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.simulate.calibration import fit
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.events import Header
from tidewheel.simulate.recorder import Recorder
from tidewheel.simulate.recording_scheduler import RecordingScheduler
from tidewheel.simulate.replay import Recording, measured_steps
from tidewheel.tenants import parse_tenants

_numbers = itertools.count()


def check_folder(config: EngineConfig) -> None:
    """Raises `ConfigError` when the folder that is to hold recordings is not there or cannot be written."""
    folder = Path(config.record)
    if not config.record:
        return
    if not folder.is_dir():
        raise ConfigError(f"record is {config.record!r}: there is no folder {folder.resolve()}; make it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"record is {config.record!r}: the folder cannot be written")


def recorded(scheduler: Scheduler, config: EngineConfig, info: EngineInfo) -> RecordingScheduler:
    """Writes to a new file in `config.record`. Raises `ConfigError` when that cannot be opened."""
    check_folder(config)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = Path(config.record) / f"{stamp}-{os.getpid()}-{next(_numbers)}.jsonl"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"record is {config.record!r}: {error}") from None
    recorder = Recorder(
        os.fdopen(descriptor, "wb", buffering=0),
        settings=config.to_settings(),
        info=msgspec.to_builtins(info),
        with_contents=config.enable_prefix_caching,
        named_tenants=tuple(parse_tenants(config.tenants)),
    )
    atexit.register(recorder.flush)
    return RecordingScheduler(scheduler, recorder)


def scheduler_of(header: Header) -> Scheduler:
    """A new scheduler like the recorded one. Raises `ConfigError` when this version cannot make it."""
    from tidewheel.engine.build import build_scheduler

    config, info = _engine_of(header)
    return build_scheduler(config, info)


def calibrated(path: Path) -> CostModel:
    """The cost model of the steps of a recording."""
    recording = Recording(path)
    _, info = _engine_of(recording.header)
    return fit(
        measured_steps(recording.events()),
        name=path.stem,
        device=info.device,
        weights_bytes=info.weights_bytes,
        kv_bytes_per_token=info.kv_cache_bytes / max(info.num_cache_tokens, 1),
        block_size=info.block_size,
        num_blocks=info.num_blocks,
    )


def _engine_of(header: Header) -> tuple[EngineConfig, EngineInfo]:
    try:
        info = msgspec.convert(header.info, EngineInfo)
        return EngineConfig.from_settings(header.settings | {"record": ""}), info
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(
            f"the recording is of version {header.version}, and this one cannot read it: {error}"
        ) from None
