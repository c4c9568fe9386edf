"""One tiny model for the tests of the runner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import tiny_models
from support.models.peft_folders import write_merged, write_peft
from support.runner import capturable
from support.runner.chosen_slots import ADAPTERS, Answers, Folders, requests_of, settings
from support.runner.graphed_runner import LOADED_SIZES
from support.runner.recorded_graphs import RecordingAccelerator
from support.runner.step_loop import StepLoop
from tidewheel.config import EngineConfig
from tidewheel.runner import loading, model_runner
from tidewheel.runner.kv_tensors import MemoryBudget
from tidewheel.runner.loading import cache_budget
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import GraphSizes


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


@pytest.fixture(scope="module")
def one_rounding() -> Iterator[None]:
    """Compare tokens of steps of different sizes."""
    with capturable.products_of_torch():
        yield


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingAccelerator]:
    """Load runners as on a GPU, with graphs of `LOADED_SIZES` that are recorded."""
    accelerator = RecordingAccelerator()

    def budget(*arguments: Any) -> MemoryBudget:
        accelerator.allocator.empty_cache()  # as `gpu_budget` does
        return cache_budget(*arguments)

    monkeypatch.setattr(loading, "cache_budget", budget)
    monkeypatch.setattr(model_runner, "accelerator_of", lambda device: accelerator)
    monkeypatch.setattr(model_runner, "graph_sizes", lambda config, parts: GraphSizes(LOADED_SIZES))
    monkeypatch.setattr(model_runner, "measured_activation_bytes", lambda run, size, *_: (run(size), 1))
    with capturable.installed(), capturable.products_of_torch():
        yield accelerator


@pytest.fixture(scope="session")
def lora_folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {
        name: write_peft(folder / name, checkpoint, seed=seed, **fields)
        for seed, (name, fields) in enumerate(ADAPTERS.items())
    }
    merged = {name: write_merged(folder / f"{name} merged", checkpoint, path) for name, path in adapters.items()}
    return Folders(checkpoint, adapters, {"": checkpoint, **merged})


@pytest.fixture(scope="session")
def lora_answers(lora_folders: Folders) -> Answers:
    """Tokens of every request on the base and on each merged model."""
    return {
        name: StepLoop(ModelRunner.load(settings(path, enable_lora=False))).run(requests_of(name))
        for name, path in lora_folders.merged.items()
    }
