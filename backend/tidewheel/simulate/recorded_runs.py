from __future__ import annotations

from pathlib import Path

import msgspec

from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError
from tidewheel.record.events import Header
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.simulate.calibration import fit
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.replay import Recording, measured_steps


def scheduler_of(header: Header) -> Scheduler:
    """Return a scheduler like the recorded one. Raise `ConfigError` if this version cannot make it."""
    config, info = _engine_of(header)
    return build_scheduler(config, info)


def calibrated(path: Path) -> CostModel:
    """Fit a cost model to a recording."""
    recording = Recording(path)
    _, info = _engine_of(recording.header)
    return fit(
        measured_steps(recording.events()),
        name=path.stem,
        device=info.device,
        weights_bytes=info.weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token(info),
        block_size=info.block_size,
        num_blocks=info.num_blocks,
    )


def kv_bytes_per_token(info: EngineInfo) -> float:
    return info.kv_cache_bytes / info.num_cache_tokens


def _engine_of(header: Header) -> tuple[EngineConfig, EngineInfo]:
    try:
        info = msgspec.convert(header.info, EngineInfo)
        return EngineConfig.from_settings(header.settings | {"record": ""}), info
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(
            f"the recording is of version {header.version}, and this one cannot read it: {error}"
        ) from None
