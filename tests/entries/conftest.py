from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from support.triton.serving import WEIGHTS
from tidewheel.entries.entry import Machine

WriteEntry = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteEntry:
    """Write an entry into the repository `tmp_path / "models"`."""

    def write_entry(name: str, config: str, model_json: Mapping[str, object] | str | None = None) -> Path:
        folder = tmp_path / "models" / name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(config)
        if model_json is not None:
            text = model_json if isinstance(model_json, str) else json.dumps(model_json, indent=4)
            (folder / "1" / "model.json").write_text(text)
        return folder

    return write_entry


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Return a copy of the demo's model, to be damaged."""
    return Path(shutil.copytree(WEIGHTS, tmp_path / "weights"))


@pytest.fixture(autouse=True)
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", lambda: Machine(num_gpus=0, num_cores=2))
