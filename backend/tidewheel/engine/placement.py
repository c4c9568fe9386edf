"""Choice of a front end's engine when settings change: the present one, a second one, or a replacement."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import msgspec

from tidewheel.config import EngineConfig, describe_changes
from tidewheel.engine import folder
from tidewheel.engine.connection import ANSWER_S, drain_all
from tidewheel.engine.launcher import stop_engine
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError
from tidewheel.private_dir import private_dir
from tidewheel.runner.host_memory import available_host_bytes
from tidewheel.settings import MIB
from tidewheel_process.child import wait_until
from tidewheel_process.locked_folder import LOCK, try_lock, unlock

log = logging.getLogger(__name__)

DRAIN_S = 30.0  # for requests of an engine that makes room
FINAL_ANSWERS_S = 3.0
_POLL_S = 0.1


def choose_engine(model_dir: Path, config: EngineConfig) -> folder.EngineTarget:
    """Return the engine for these settings; `make_current` moves other front ends to it.

    If memory does not hold two engines, the present one ends first.
    """
    status = folder.read_status(model_dir / folder.CURRENT)
    identity = _identity(config)
    wanted = folder.new_target(model_dir / identity, config, identity)
    is_first = status is None or not status.is_alive or status.is_draining
    if status is not None and not is_first:
        try:
            started = EngineConfig.from_settings(status.started)
        except ConfigError as error:
            log.info("another engine is needed: the present one is of another version (%s)", error)
        else:
            if started.can_become(config) and _identity(started) == status.identity:
                return wanted._replace(folder=model_dir / status.identity, identity=status.identity, started=started)
            log.info(
                "another engine is needed: %s", describe_changes(started, config) or "files of the model changed"
            )
        if not _fits_beside(status, config):
            log.warning("memory is short: engine %d ends before the next one starts", status.pid)
            present = model_dir / status.identity
            wait_until(lambda: not drain_all([present], ANSWER_S), DRAIN_S, _POLL_S)
            stop_engine(present, FINAL_ANSWERS_S)
    private_dir(wanted.folder)
    if is_first:
        make_current(wanted)
    return wanted


def find_engine(model_dir: Path) -> folder.EngineTarget | None:
    status = folder.read_serving(model_dir / folder.CURRENT)
    if status is None or status.is_draining:
        return None
    started, config = (EngineConfig.from_settings(settings) for settings in (status.started, status.settings))
    return folder.EngineTarget(model_dir / status.identity, status.identity, started, config, status.read_ns)


def may_start(target: folder.EngineTarget) -> bool:
    """Return whether the engine has ended and may be started again."""
    status = folder.read_status(target.folder)
    return status is not None and not (status.is_alive or status.is_draining or status.is_given_up)


def take_back(model_dir: Path) -> None:
    """Let the engine that ended to free memory start again."""
    status = folder.read_status(model_dir / folder.CURRENT)
    if status is not None and status.is_draining and not status.is_alive:
        folder.write_status(model_dir / folder.CURRENT, msgspec.structs.replace(status, is_draining=False))


def _remove_ended(target: folder.EngineTarget) -> None:
    for path in target.folder.parent.iterdir():
        if path.is_symlink() or not path.is_dir() or path == target.folder:
            continue
        status = folder.read_status(path)
        if (status is None or not status.is_alive) and (lock := try_lock(path / LOCK)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            unlock(lock)


def make_current(target: folder.EngineTarget) -> None:
    """Make all front ends of the model switch to this engine."""
    model_dir = target.folder.parent
    temporary = model_dir / f"{folder.CURRENT}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.folder.name)
    temporary.replace(model_dir / folder.CURRENT)
    _remove_ended(target)


def _identity(config: EngineConfig) -> str:
    files = [_describe_files(Path(name)) for name in (config.model, config.tokenizer) if name]
    return folder.settings_digest({"settings": config.fixed_settings(), "files": files})


def _describe_files(model: Path) -> list[tuple[str, int, int]]:
    try:
        stats = [(path.name, path.stat()) for path in sorted(model.iterdir())]
    except OSError:
        return []
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _fits_beside(status: folder.Status, config: EngineConfig) -> bool:
    info = status.info
    if info is None:
        return False
    needed = info.weights_bytes + info.activation_bytes + info.graph_bytes + _cache_bytes(info, config)
    if info.device_bytes:
        used = info.weights_bytes + info.activation_bytes + info.graph_bytes + info.kv_cache_bytes
        return used + needed <= info.device_bytes
    available = available_host_bytes()
    return available is None or needed <= available


def _cache_bytes(info: EngineInfo, config: EngineConfig) -> int:
    if config.num_blocks is not None:
        block_size = config.block_size or info.block_size
        return config.num_blocks * block_size * info.kv_cache_bytes // max(info.num_cache_tokens, 1)
    if config.kv_cache_memory_mb is not None:
        return config.kv_cache_memory_mb * MIB
    return int(config.gpu_memory_utilization * info.device_bytes)  # a CPU's cache takes what is left
