from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.entries.foreign_entries import write_entry
from support.triton.serving import WEIGHTS
from tidewheel.entries import config_rules

WriteEntry = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteEntry:
    """Write an entry into the repository `tmp_path / "models"`."""

    return functools.partial(write_entry, tmp_path / "models")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Return a copy of the demo's model, to be damaged."""
    return Path(shutil.copytree(WEIGHTS, tmp_path / "weights"))


@pytest.fixture(autouse=True)
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_rules, "num_gpus", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
