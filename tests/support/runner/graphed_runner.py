"""Runners whose steps are graphs that are recorded on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from support.runner import capturable
from support.runner.recorded_graphs import RecordedGraph, RecordingAccelerator
from support.runner.step_loop import StepLoop, poison
from tidewheel.batch import SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.config import DType, EngineConfig
from tidewheel.models.causal_lm import DTYPES, CausalLM, no_progress
from tidewheel.request import Request
from tidewheel.runner.host_tier import BlockTransfers, HostBlocks
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel.runner.loading import RunnerParts, load_parts
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import GraphSizes
from tidewheel.scheduler.scheduler import Scheduler

SIZES = [1, 2, 4, 8, 16]
DECODES = GraphSizes(SIZES)
LOADED_SIZES = [1, 2, 4, 5]  # of runners that are loaded with graphs


def loaded(folder: Path, dtype: DType = "float32") -> ModelRunner:
    return ModelRunner.load(
        EngineConfig(
            model=str(folder), dtype=dtype, device="cpu", max_num_seqs=16, max_model_len=128, num_blocks=64,
            num_threads=1,
        )
    )  # fmt: skip


def with_graphs(plain: ModelRunner, sizes: GraphSizes = DECODES) -> ModelRunner:
    return with_model(plain, model_of(plain), sizes)


def model_of(runner: ModelRunner) -> CausalLM:
    """Return the model of a runner once more, from its folder."""
    config = EngineConfig(model=runner.info.model, dtype=runner.info.dtype, device="cpu", num_threads=1)
    return load_parts(config, no_progress).model


def with_model(plain: ModelRunner, model: CausalLM, sizes: GraphSizes | None = DECODES) -> ModelRunner:
    """Return a runner like `plain` with a cache of its own.

    With graphs it has a recording accelerator: call and use it with the capturable operations.
    """
    info, device = plain.info, torch.device("cpu")
    layout = CacheLayout(model.shape, info.block_size, DTYPES[info.dtype])
    kv, parts = KVTensors(layout, info.num_blocks, device), RunnerParts(model, layout, info, device)
    if sizes is None:
        return ModelRunner(parts, BlockTransfers(kv))
    runner = ModelRunner(parts, BlockTransfers(kv, HostBlocks(kv, 32)), RecordingAccelerator())
    poison(runner)
    with capturable.installed():
        runner.capture(sizes, lambda stage, fraction: None)
    return runner


def as_new(runner: ModelRunner) -> ModelRunner:
    """Forget its replays, and poison its cache."""
    poison(runner)
    for graph in graphs_of(runner):
        graph.num_replays = 1
    return runner


def graphs_of(runner: ModelRunner) -> list[RecordedGraph]:
    return runner._accelerator.pools[-1].graphs


def graphed_tokens(
    graphed: ModelRunner, requests: Sequence[Request], loop: type[StepLoop] = StepLoop, **settings: object
) -> list[list[int]]:
    with capturable.installed():
        return loop(graphed, **settings).run(requests)


def launches(graphed: ModelRunner, requests: Sequence[Request], **settings: object) -> list[str]:
    """Return how each step ran."""
    seen: list[str] = []
    apply = Scheduler.apply

    def noted(self: Scheduler, batch: ScheduledBatch, sampled: SampledTokens, now: float) -> StepOutputs:
        seen.append(sampled.launch)
        return apply(self, batch, sampled, now)

    with mock.patch.object(Scheduler, "apply", noted):
        graphed_tokens(graphed, requests, **settings)
    return seen
