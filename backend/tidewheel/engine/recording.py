"""Recordings of an engine, one file per scheduler."""

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
from tidewheel.record.recorder import Recorder
from tidewheel.tenants import parse_tenants

_numbers = itertools.count()


def check_folder(config: EngineConfig) -> None:
    """Raise `ConfigError` if the `record` folder is missing or cannot be written."""
    folder = Path(config.record)
    if not config.record:
        return
    if not folder.is_dir():
        raise ConfigError(f"record is {config.record!r}: there is no folder {folder.resolve()}; make it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"record is {config.record!r}: the folder cannot be written")


def open_recorder(config: EngineConfig, info: EngineInfo) -> Recorder:
    """Open a new file in `config.record`. Raise `ConfigError` if that fails."""
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
    return recorder
