from __future__ import annotations

import time
from pathlib import Path

from tidewheel.config import EngineConfig
from tidewheel.engine.folder import EngineTarget, settings_digest


def new_target(folder: Path, config: EngineConfig, identity: str = "") -> EngineTarget:
    identity = identity or settings_digest(config.to_settings())
    return EngineTarget(folder, identity, config, config, time.monotonic_ns())
