"""Host time of one decoder layer that is launched kernel by kernel, and of its attention
alone, on a stand-in for the CUDA driver.

    python benchmarks eager_layer

Matrix products allocate their result and compute nothing. CPU time of the thread, the fastest of several rounds.
Left out: the driver's launch itself, cuBLAS, and the allocator of a GPU's memory in place of a CPU's.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest import mock

import torch

from gpu.kernel_sweep import replaced
from modelled.roofline import SHAPES, Shape
from modelled.stub_driver import Launches, stub_driver
from tidewheel.models import decoder
from tidewheel.models import linear as linear_layers
from tidewheel.models.architectures import ModelConfig, RopeConfig
from tidewheel.models.causal_lm import KVLayer, TokenLocations
from tidewheel_kernels import AttentionMetadata, choice

MODELS = ("qwen3-0.6b", "llama-3.1-8b")
NUM_MULTIPROCESSORS = 132
ROUNDS, CALLS = 300, 10
PROMPT_TOKENS = 8  # few: a CPU maps memory anew for large results
BLOCK_SIZE = 64
MAX_MODEL_LEN = 4096
CPU = torch.device("cpu")
# Decodes beside one prompt.
KINDS = {"prompt": 0, "prompt and 4 decodes": 4, "prompt and 64 decodes": 64}


class LayerTime(NamedTuple):
    host_us: float
    launches: int
    triton_us: float  # in triton-lang's own way
    attention_us: float  # launched between two graphs
    attention_launches: int


class Calls(NamedTuple):
    layer: Callable[[], object]
    attention: Callable[[], object]


def model_config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        architecture="", vocab_size=64, hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_layers=1,
        num_q_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, rms_norm_eps=1e-6,
        max_position_embeddings=MAX_MODEL_LEN, rope=RopeConfig(rope_type="default", theta=shape.rope_theta),
        qk_norm=shape.qk_norm, sliding_windows=(0,),
    )  # fmt: skip


def layer_calls(shape: Shape, num_decodes: int) -> Calls:
    """Return calls of one layer of random weights on a prompt and decodes."""
    cos_sin = torch.empty(MAX_MODEL_LEN, shape.head_dim)
    layer = decoder.DecoderLayer(
        model_config(shape), 0, decoder.Weights(torch.bfloat16, CPU, lambda _: None), cos_sin
    )
    num_tokens, num_seqs = PROMPT_TOKENS + num_decodes, 1 + num_decodes
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    meta = AttentionMetadata(
        ids, torch.zeros(num_seqs, MAX_MODEL_LEN // BLOCK_SIZE, dtype=torch.int32),
        torch.zeros(num_seqs + 1, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32),
        PROMPT_TOKENS, MAX_MODEL_LEN, num_decodes,
    )  # fmt: skip
    kv = KVLayer(*torch.empty(2, 16, BLOCK_SIZE, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16))
    hidden, residual = torch.empty(2, num_tokens, shape.hidden, dtype=torch.bfloat16)

    def call() -> object:
        cut = layer.begin(hidden, residual, TokenLocations(ids, ids), kv)
        return layer.end(layer.attend(cut.queries, meta, kv), cut.residual, None)

    queries = layer.begin(hidden, residual, TokenLocations(ids, ids), kv).queries
    attended = torch.empty(queries.shape, dtype=queries.dtype)
    return Calls(call, lambda: layer.attend(queries[:num_tokens], meta, kv, out=attended))


@contextmanager
def no_products() -> Iterator[None]:
    def linear(x: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None) -> torch.Tensor:
        return x.new_empty((x.shape[0], weight.shape[0]))

    with mock.patch.object(linear_layers, "linear", linear):
        yield


def seconds(call: Callable[[], object]) -> float:
    rounds = []
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for _ in range(CALLS):
            call()
        rounds.append((time.thread_time() - begin) / CALLS)
    gc.enable()
    return min(rounds)


def layer_time(shape: Shape, num_decodes: int, launches: Launches) -> LayerTime:
    calls = layer_calls(shape, num_decodes)
    calls.layer()
    num_launches = []
    for call in calls:
        before = launches.count
        call()
        num_launches.append(launches.count - before)
    layer_us, attention_us = (round(1e6 * seconds(call), 1) for call in calls)
    with mock.patch("tidewheel_kernels.triton_launch.KernelLauncher.__call__", _unbound):
        triton_us = round(1e6 * seconds(calls.layer), 1)
    return LayerTime(layer_us, num_launches[0], triton_us, attention_us, num_launches[1])


def _unbound(launch: object, grid: tuple[int, ...], tensors: tuple[torch.Tensor, ...], *others: object) -> None:
    launch._through_triton(grid, tensors, others)  # type: ignore[attr-defined]


def measure(models: tuple[str, ...] = MODELS) -> Mapping[str, Mapping[str, LayerTime]]:
    """Return times by model and kind of step."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(choice, "choose", lambda *_, **__: "triton"))
        launches = stack.enter_context(stub_driver())
        stack.enter_context(torch.inference_mode())
        stack.enter_context(no_products())
        decoder.rms_norm(torch.ones(1, 64), torch.ones(64), 1e-6)  # its kernels' modules are imported
        import tidewheel_kernels.attention.triton_kernels  # noqa: F401

        stack.enter_context(replaced("multiprocessors", {"": NUM_MULTIPROCESSORS}))
        return {
            model: {kind: layer_time(SHAPES[model], count, launches) for kind, count in KINDS.items()}
            for model in models
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.pop("TRITON_INTERPRET", None)
    print(json.dumps({m: {k: t._asdict() for k, t in times.items()} for m, times in measure().items()}, indent=1))
