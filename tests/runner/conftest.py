"""One tiny model for the tests of the runner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.models import tiny_models
from tidewheel.config import EngineConfig
from tidewheel.runner.model_runner import ModelRunner


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_models.save(tiny_models.llama, folder)
    return folder


@pytest.fixture
def config(checkpoint: Path) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint),
        dtype="float32",
        device="cpu",
        max_num_seqs=16,
        num_blocks=64,
        block_size=16,
        num_threads=1,
    )


@pytest.fixture
def runner(config: EngineConfig) -> ModelRunner:
    return ModelRunner.load(config)
