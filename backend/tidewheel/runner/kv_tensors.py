"""Number and tensors of the cache blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from tidewheel.batch import Int32Array
from tidewheel.byte_sizes import MIB
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import KVLayer, ModelShape
from tidewheel_kernels import FP8, copy_blocks

DEFAULT_CPU_MB = 512
MOST_OF_A_GPU = 0.98  # highest recommendation


class CacheLayout(NamedTuple):
    shape: ModelShape
    block_size: int
    dtype: torch.dtype
    scales: torch.Tensor | None = None  # [num_layers, 2, num_kv_heads] float32, of keys and values of 8 bits

    @property
    def block_bytes(self) -> int:
        tokens = 2 * self.shape.num_layers * self.block_size  # keys and values
        return tokens * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize


class Share(NamedTuple):
    fraction: float
    total: int  # bytes


class MemoryBudget(NamedTuple):
    """Bytes for the cache, and where they come from."""

    bytes: int
    source: str  # for messages: "kv_cache_memory_mb 512"
    setting: str  # setting to raise if too small
    share: Share | None = None  # None: the setting is in MiB

    def least_setting(self, num_bytes: int) -> float | None:
        """Return the setting that gives `num_bytes`, or None."""
        if self.share is None:
            return -(-num_bytes // MIB)
        fraction = self.share.fraction + (num_bytes - self.bytes) / self.share.total
        rounded = math.ceil(100 * fraction) / 100
        return rounded if rounded <= MOST_OF_A_GPU else None


def cpu_budget(config: EngineConfig) -> MemoryBudget:
    megabytes = config.kv_cache_memory_mb or DEFAULT_CPU_MB
    return MemoryBudget(megabytes * MIB, f"kv_cache_memory_mb {megabytes}", "kv_cache_memory_mb")


def decide_num_blocks(num_blocks: int | None, budget: MemoryBudget, layout: CacheLayout, max_model_len: int) -> int:
    """Raise `ConfigError` if one request cannot fit."""
    needed = -(-max_model_len // layout.block_size)
    if num_blocks is None:
        source, setting, least = budget.source, budget.setting, budget.least_setting(needed * layout.block_bytes)
        num_blocks = max(budget.bytes, 0) // layout.block_bytes
    else:
        source, setting, least = f"num_blocks {num_blocks}", "num_blocks", needed
    tokens = num_blocks * layout.block_size
    if tokens < max_model_len:
        ways = [f"set max_model_len to at most {tokens}"] if tokens else []
        ways += [f"raise {setting} to at least {least:g}"] if least is not None else []
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {source} gives a KV cache of {tokens} tokens: "
            f"{', or '.join(ways) or 'use a larger GPU'} ({needed} blocks of {layout.block_size} tokens need "
            f"{-(-needed * layout.block_bytes // MIB)} MiB)"
        )
    return num_blocks


class KVTensors:
    """All layers in one tensor, so that copying blocks takes one launch. 8-bit floats are bytes in it."""

    def __init__(self, layout: CacheLayout, num_blocks: int, device: torch.device) -> None:
        shape = layout.shape
        self._tensor = torch.zeros(
            shape.num_layers, 2, num_blocks, layout.block_size, shape.num_kv_heads, shape.head_dim,
            dtype=torch.uint8 if layout.dtype == FP8 else layout.dtype, device=device,
        )  # fmt: skip
        scales = [None] * shape.num_layers if layout.scales is None else layout.scales
        layers = zip(self._tensor.view(layout.dtype), scales, strict=True)
        self.layers = [KVLayer(layer[0], layer[1], of_heads) for layer, of_heads in layers]

    @property
    def num_bytes(self) -> int:
        return self._tensor.nbytes

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    @property
    def blocks(self) -> torch.Tensor:
        """View [num_blocks, 2 * num_layers, block_size, num_kv_heads, head_dim]; blocks are not contiguous."""
        return self._tensor.flatten(0, 1).transpose(0, 1)

    def largest(self) -> torch.Tensor:
        """Return the largest magnitude [num_layers, 2, num_kv_heads]."""
        return self._tensor.abs().amax(dim=(2, 3, 5))

    def copy(self, sources: Int32Array, targets: Int32Array) -> None:
        if len(sources):
            source, target = (index_on(self._tensor.device, ids) for ids in (sources, targets))
            copy_blocks(self._tensor.flatten(0, 1), source, target)


def index_on(device: torch.device, ids: Int32Array) -> torch.Tensor:
    """Return [n] int64 without waiting: torch keeps pinned memory until the copy is done."""
    index = torch.from_numpy(ids.astype(np.int64))
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index
