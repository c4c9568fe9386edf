"""Modelled device under the real `ModelRunner`: work takes stated seconds, piece after piece, as on a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from common.clocks import Clock
from tidewheel.models.causal_lm import ForwardInput, ModelShape
from tidewheel.runner.accelerator import CapturedGraph
from tidewheel.runner.host_tier import BlockTransfers
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel.runner.loading import RunnerParts
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import GraphSizes

VOCAB_SIZE = 64
BLOCK_SIZE = 64


class Busy(NamedTuple):
    begin: float
    end: float


class ModelledDevice:
    device = torch.device("cpu")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free_at = 0.0
        self.busy: list[Busy] = []  # in order, without overlap

    def compute(self, seconds: float) -> None:
        begin = max(self.clock(), self.free_at)
        self.free_at = begin + seconds
        self.busy.append(Busy(begin, self.free_at))

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def event(self) -> ModelledEvent:
        return ModelledEvent(self)

    def graph_pool(self) -> ModelledPool:
        return ModelledPool(self)

    def idle_fraction(self, begin: float, end: float) -> float:
        busy = sum(max(min(work.end, end) - max(work.begin, begin), 0.0) for work in self.busy)
        return 1.0 - busy / (end - begin)


class ModelledEvent:
    def __init__(self, device: ModelledDevice) -> None:
        self._device = device
        self._moment = 0.0

    def record(self) -> None:
        self._moment = self._device.free_at

    def synchronize(self) -> None:
        self._device.clock.wait_until(self._moment)


class ModelledGraph:
    def __init__(self, device: ModelledDevice, works: list[float]) -> None:
        self._device = device
        self._works = works

    def replay(self) -> None:
        for seconds in self._works:
            self._device.compute(seconds)


class ModelledPool:
    """Pool of graphs as long as the work captured in them."""

    num_bytes = 0

    def __init__(self, device: ModelledDevice) -> None:
        self._device = device

    def capture(self, function: Callable[[], torch.Tensor]) -> CapturedGraph[torch.Tensor]:
        before = len(self._device.busy)
        output = function()
        works = [work.end - work.begin for work in self._device.busy[before:]]
        return CapturedGraph(ModelledGraph(self._device, works), output)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class ModelledModel:
    """Model with `decode_seconds` a decode step and `prefill_seconds` a prompt token."""

    shape = ModelShape(
        num_layers=1, num_kv_heads=1, head_dim=1, vocab_size=VOCAB_SIZE, hidden_size=1, intermediate_size=1
    )
    weights_bytes = 0
    is_capturable = True

    def __init__(self, device: ModelledDevice, decode_seconds: float, prefill_seconds: float) -> None:
        self._device = device
        self._decode_seconds = decode_seconds
        self._prefill_seconds = prefill_seconds
        self._logits = torch.zeros(1, VOCAB_SIZE)

    def forward(self, step: ForwardInput) -> torch.Tensor:
        num_decodes = step.meta.num_decodes
        num_prompt_tokens = len(step.token_ids) - num_decodes
        self._device.compute(
            (self._decode_seconds if num_decodes else 0.0) + num_prompt_tokens * self._prefill_seconds
        )
        return self._logits.expand(len(step.logit_indices), VOCAB_SIZE)


def modelled_runner(
    device: ModelledDevice,
    *,
    decode_seconds: float,
    prefill_seconds: float,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    graph_sizes: Sequence[int],
) -> ModelRunner:
    """Make a runner with room for all requests at full length."""
    num_blocks = max_num_seqs * -(-max_model_len // BLOCK_SIZE)
    model = ModelledModel(device, decode_seconds, prefill_seconds)
    layout = CacheLayout(model.shape, BLOCK_SIZE, torch.float32)
    info = RunnerInfo(
        model="", architecture="none", device="modelled", dtype="float32", vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        block_size=BLOCK_SIZE, num_blocks=num_blocks, weights_bytes=0, activation_bytes=0, kv_cache_bytes=0,
        load_seconds=0.0,
    )  # fmt: skip
    cache = BlockTransfers(KVTensors(layout, num_blocks, device.device))
    runner = ModelRunner(RunnerParts(model, layout, info, device.device), cache, device)
    runner.capture(GraphSizes(graph_sizes), lambda _stage, _fraction: None)
    device.busy.clear()
    device.free_at = 0.0
    return runner
