"""How tests load a model file by its adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.adapters import load_adapter, with_kind


def load(path: Path, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Return (adapter, signature)."""
    given = {"model": str(path), "num_threads": 1, "adapter_options": json.dumps(options or {}), **settings}
    return load_adapter(EngineConfig.from_settings(with_kind(given)))


def refusal(path: Path, options: dict[str, Any] | None = None, **settings: Any) -> str:
    """Return the error of the load, which is one line."""
    with pytest.raises(ConfigError) as error:
        load(path, options, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)
