"""Block copies inside the cache, and to pinned host memory and back, for the largest model."""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np
import torch

from gpu.measurements import OURS, throughput
from gpu.stage import Stage
from gpu.timing import Call, KernelCase
from modelled.roofline import SHAPES, Shape
from tidewheel.batch import Int32Array
from tidewheel.models import causal_lm
from tidewheel.runner.host_tier import HostBlocks
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel_kernels import copy_blocks

BLOCK_SIZE = 64
COPIED = (1, 16, 256)  # blocks
MOVED = (8, 64, 256)
ROUNDS = 10


def layout_of(shape: Shape) -> CacheLayout:
    model = causal_lm.ModelShape(
        shape.layers, shape.kv_heads, shape.head_dim, shape.vocab, shape.hidden, shape.intermediate
    )
    return CacheLayout(model, BLOCK_SIZE, torch.bfloat16)


def largest_layout(is_dry: bool) -> CacheLayout:
    return layout_of(SHAPES["tiny" if is_dry else "llama-3.1-8b"])


def copy_case(layout: CacheLayout, count: int) -> KernelCase:
    make = partial(copy_call, layout, count)
    return KernelCase("block copy", _case(layout, count), 2 * count * layout.block_bytes, {OURS: make})


def swaps(stage: Stage) -> None:
    for count in (2,) if stage.is_dry else MOVED:
        with stage.part(f"swap, {count} blocks"):
            stage.check_time(3.0)
            swap(stage, largest_layout(stage.is_dry), count)


def _case(layout: CacheLayout, count: int) -> str:
    return f"{count} blocks of {layout.block_bytes / 2**20:.2f} MiB"


def copy_call(layout: CacheLayout, count: int, device: torch.device) -> Call:
    shape = layout.shape
    cache = torch.zeros(
        2 * shape.num_layers, 2 * count, layout.block_size, shape.num_kv_heads, shape.head_dim,
        dtype=layout.dtype, device=device,
    )  # fmt: skip
    order = torch.randperm(2 * count, device=device)
    source, target = order[:count].clone(), order[count:].clone()
    return lambda: copy_blocks(cache, source, target)


def swap(stage: Stage, layout: CacheLayout, count: int) -> None:
    """Time preemption's gather and bus copies, there and back."""
    host = HostBlocks(KVTensors(layout, 2 * count, stage.device), count)
    rng = np.random.default_rng(0)
    blocks: Int32Array = rng.permutation(2 * count)[:count].astype(np.int32)
    slots: Int32Array = rng.permutation(count).astype(np.int32)
    num_bytes = count * layout.block_bytes
    ways = {
        "out": (lambda: host.write_out(blocks, slots), stage.ceilings.to_host),
        "in": (lambda: host.read_in(slots, blocks), stage.ceilings.from_host),
    }
    for way, (call, ceiling) in ways.items():
        call()
        seconds = [stage.clocked(call) for _ in range(2 if stage.is_dry else ROUNDS)]
        limit = 1e-9 * ceiling or None
        stage.result(throughput(f"swap {way}", _case(layout, count), seconds, 1e-9 * num_bytes, "GB/s", limit))
        stage.facts(seconds_per_block=statistics.median(seconds) / count, direction=way, blocks=count)
