"""The load of a runner with graphs, as on a GPU, with graphs that are recorded on a CPU."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch

from support.runner.decode_workloads import KINDS, workload
from support.runner.graphed_runner import LOADED_SIZES
from support.runner.recorded_graphs import RecordingAccelerator
from support.runner.step_loop import StepLoop
from tidewheel.config import CacheDType, EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.runner import model_runner
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import GraphSizes, StepGraphs

pytestmark = pytest.mark.usefixtures("one_rounding")


@pytest.fixture
def small(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(
        config, max_num_seqs=5, max_num_batched_tokens=64, max_model_len=128, enable_prefix_caching=False
    )


def test_graphs_are_tried_then_the_cache_is_made_then_all_are_captured(
    small: EngineConfig, accelerator: RecordingAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is told what graphs need, and the tried ones are gone by then: their memory is free."""
    tried: list[weakref.ref[StepGraphs]] = []
    reserved: list[int] = []
    init, allocate = StepGraphs.__init__, model_runner.allocate_cache

    def noted(self: StepGraphs, *arguments: object, **lora: object) -> None:
        init(self, *arguments, **lora)
        tried.append(weakref.ref(self))

    def checked(parts: object, config: object, activation_bytes: int, graph_bytes: int) -> object:
        assert [graphs() for graphs in tried] == [None]
        reserved.append(graph_bytes)
        return allocate(parts, config, activation_bytes, graph_bytes)

    monkeypatch.setattr(StepGraphs, "__init__", noted)
    monkeypatch.setattr(model_runner, "allocate_cache", checked)
    stages: dict[str, float] = {}
    gc.disable()
    try:
        runner = ModelRunner.load(small, lambda stage, fraction: stages.update({stage: fraction}))
    finally:
        gc.enable()
    assert list(stages)[-1] == "graphs"
    assert stages["graphs"] == 1.0
    trial, final = accelerator.pools
    assert (len(trial.graphs), len(final.graphs)) == (3 * 3, 3 * len(LOADED_SIZES))
    assert runner.info.graph_bytes == final.num_bytes
    assert reserved[0] >= final.num_bytes > 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_what_was_loaded_computes_as_without_graphs(
    small: EngineConfig, accelerator: RecordingAccelerator, kv_cache_dtype: CacheDType
) -> None:
    small = dataclasses.replace(small, kv_cache_dtype=kv_cache_dtype)
    runner = ModelRunner.load(small)
    assert accelerator.pools[-1].graphs[0].num_replays == 1
    tokens = StepLoop(runner, token_budget=64).run(workload(KINDS["filtered"], 8))
    assert sum(graph.num_replays - 1 for graph in accelerator.pools[-1].graphs) > 10
    with pytest.MonkeyPatch.context() as eager:
        eager.setattr(model_runner, "accelerator_of", lambda device: None)
        eager.setattr(model_runner, "graph_sizes", lambda config, parts: GraphSizes())
        plain = ModelRunner.load(small)
    assert StepLoop(plain, token_budget=64).run(workload(KINDS["filtered"], 8)) == tokens


@pytest.mark.usefixtures("accelerator")
def test_too_little_memory_for_graphs_is_said_in_one_line(
    small: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StepGraphs, "capture", refuse)
    with pytest.raises(ConfigError, match=r"no room for CUDA graphs .* or set enforce_eager") as caught:
        ModelRunner.load(small)
    assert "\n" not in str(caught.value)
