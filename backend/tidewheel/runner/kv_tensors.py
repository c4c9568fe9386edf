"""Size, memory and quantisation scales of the KV cache.

Scales of 8-bit floats are powers of two, measured once at load. Scales of 1.0 raise Llama-3.1-70B's perplexity from
2.73 to 2.89, measured ones to 2.75 (https://github.com/ROCm/vllm/pull/317).
"""

import logging
import math
import mmap
from typing import NamedTuple

import numpy as np
import torch

from tidewheel.batch import Int32Array
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import CausalLM, ForwardInput, KVLayer, ModelShape
from tidewheel.models.loader import ModelPlan
from tidewheel.models.trial_prompt import one_sequence, random_tokens
from tidewheel.settings import MIB, shown_bytes
from tidewheel_kernels import FP8, INT8, copy_blocks
from tidewheel_kernels.kv_cache.codes import codes_of, head_bytes

MOST_OF_A_GPU = 0.98  # highest recommended fraction


class CacheLayout(NamedTuple):
    shape: ModelShape
    block_size: int
    dtype: torch.dtype
    scales: torch.Tensor | None = None  # [num_layers, 2, num_kv_heads] float32, of 8-bit floats
    draft_bytes: int = 0  # of a draft model's cache, for a block

    @property
    def all_block_bytes(self) -> int:
        """Return the bytes of a block with those of a draft model's cache."""
        return self.block_bytes + self.draft_bytes

    @property
    def block_bytes(self) -> int:
        tokens = 2 * self.shape.num_layers * self.block_size
        return tokens * self.shape.num_kv_heads * head_bytes(self.shape.head_dim, self.dtype)


class MemoryBudget(NamedTuple):
    bytes: int
    source: str  # e.g. "kv_cache_memory_mb 512"
    setting: str
    device_bytes: int | None = None  # memory of which `setting` is a fraction; None: `setting` is in MiB
    fraction: float = 0.0
    host_bytes: int | None = None  # bound of a CPU cache

    def least_setting(self, num_bytes: int) -> float | None:
        """Return the least `setting` (MiB, or fraction) for `num_bytes`, if any."""
        if self.host_bytes is not None and num_bytes > self.host_bytes:
            return None
        if self.device_bytes is None:
            return -(-num_bytes // MIB)
        fraction = self.fraction + (num_bytes - self.bytes) / self.device_bytes
        rounded = math.ceil(100 * fraction) / 100
        return rounded if rounded <= MOST_OF_A_GPU else None


class CacheSize(NamedTuple):
    num_blocks: int
    max_model_len: int
    source: str
    shortened: str = ""  # log line, if the context is shortened


def limited_budget(share: float, total: int, beside: int, free: int, *, is_of_gpu: bool = False) -> MemoryBudget:
    """Return what a share of `total` bytes leaves for the cache `beside` other bytes, at most the `free` bytes."""
    limit, setting = int(share * total), "device_memory_share"
    if limit - beside > free:
        source = f"the {shown_bytes(max(free, 0))} of memory to spare"
        return MemoryBudget(free, source, setting, host_bytes=free)
    source = f"{setting} {share:g} ({shown_bytes(limit)}, {shown_bytes(beside)} of them beside the cache)"
    return MemoryBudget(limit - beside, source, setting, total, share, None if is_of_gpu else free)


def decide_size(
    num_blocks: int | None,
    budget: MemoryBudget,
    layout: CacheLayout,
    max_model_len: int,
    *,
    may_shorten: bool = False,
) -> CacheSize:
    """Return the number of blocks (`num_blocks`, or what `budget` holds) and the context length.

    Raise `ConfigError` if the cache exceeds free host memory, or holds no request of `max_model_len` tokens;
    `may_shorten` lowers `max_model_len` instead.
    """
    needed = -(-max_model_len // layout.block_size)
    least: float | None = needed
    if num_blocks is None:
        source, setting, least = budget.source, budget.setting, budget.least_setting(needed * layout.all_block_bytes)
        num_blocks = max(budget.bytes, 0) // layout.all_block_bytes
    else:
        source, setting = f"num_blocks {num_blocks}", "num_blocks"
    num_bytes, tokens = num_blocks * layout.all_block_bytes, num_blocks * layout.block_size
    if budget.host_bytes is not None and num_bytes > budget.host_bytes:
        raise ConfigError(
            f"host memory does not suffice: KV cache {shown_bytes(num_bytes)} ({source}), and "
            f"{shown_bytes(budget.host_bytes)} are available; lower {setting}"
        )
    if tokens >= max_model_len:
        return CacheSize(num_blocks, max_model_len, source)
    need = f"{needed} blocks of {layout.block_size} tokens need {-(-needed * layout.all_block_bytes // MIB)} MiB"
    ways = [f"raise {setting} to at least {least:g}"] if least is not None else []
    is_of_gpu = budget.device_bytes is not None and budget.host_bytes is None
    larger = f"use a {'larger GPU' if is_of_gpu else 'machine with more memory'}"
    if may_shorten and tokens:
        shortened = (
            f"max_model_len is {tokens} of a context of {max_model_len} tokens, because {source} gives no larger "
            f"KV cache: set max_model_len yourself, or {', or '.join(ways) or larger} to have all ({need})"
        )
        return CacheSize(num_blocks, tokens, source, shortened)
    ways = [*([f"set max_model_len to at most {tokens}"] if tokens else []), *ways]
    raise ConfigError(
        f"max_model_len is {max_model_len}, but {source} gives a KV cache of {tokens} tokens: "
        f"{', or '.join(ways) or larger} ({need})"
    )


class KVTensors:
    """Keys and values of all layers in one tensor, so that block copies take one launch."""

    def __init__(self, layout: CacheLayout, num_blocks: int, device: torch.device) -> None:
        shape = layout.shape
        of_block = (layout.block_size, shape.num_kv_heads, shape.head_dim)
        stored = (layout.block_bytes // (2 * shape.num_layers),) if layout.dtype == INT8 else of_block
        size = (shape.num_layers, 2, num_blocks, *stored)
        dtype = torch.uint8 if layout.dtype == FP8 else layout.dtype
        self._tensor = empty_slots(size, dtype, device)
        self.num_bytes, self.device = self._tensor.nbytes, self._tensor.device
        scales = [None] * shape.num_layers if layout.scales is None else layout.scales
        caches = codes_of(self._tensor, *of_block) if layout.dtype == INT8 else self._tensor.view(layout.dtype)
        layers = zip(caches, scales, strict=True)
        self.layers = [KVLayer(layer[0], layer[1], of_heads) for layer, of_heads in layers]

    @property
    def blocks(self) -> torch.Tensor:
        """Return a view with blocks first: [num_blocks, 2 * num_layers, block_size, num_kv_heads, head_dim].

        An int8 cache has [num_blocks, 2 * num_layers, bytes]: codes, then scales.
        """
        return self._tensor.flatten(0, 1).transpose(0, 1)

    def largest(self) -> torch.Tensor:
        """Return the largest magnitude of keys and of values [num_layers, 2, num_kv_heads]."""
        return self._tensor.abs().amax(dim=(2, 3, 5))

    def copy(self, sources: Int32Array, targets: Int32Array) -> None:
        source, target = (index_on(self._tensor.device, ids) for ids in (sources, targets))
        copy_blocks(self._tensor.flatten(0, 1), source, target)


def empty_slots(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU `torch.zeros` would commit all memory at once: minutes for many GiB."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(size)


def index_on(device: torch.device, ids: Int32Array) -> torch.Tensor:
    """Copy ids to int64 [n] without waiting: torch keeps pinned memory until the copy is done."""
    index = torch.from_numpy(ids.astype(np.int64))
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


logger = logging.getLogger(__name__)

NUM_TOKENS = 256
HEADROOM = 4.0  # least ratio of the largest representable to the largest seen value
# Normal numbers of float16.
LEAST_EXPONENT, MOST_EXPONENT = -14, 15


def cache_layout(plan: ModelPlan, model: CausalLM, block_size: int) -> CacheLayout:
    """Return the layout of a loaded model's cache, with measured scales if it holds 8-bit floats."""
    layout = CacheLayout(model.shape, block_size, plan.cache_dtype)
    if plan.cache_dtype != FP8:
        return layout
    count, device = min(NUM_TOKENS, plan.max_model_len), plan.device
    meta = one_sequence(count, block_size, device)
    kv = KVTensors(layout._replace(dtype=plan.dtype), meta.block_tables.shape[1], device)
    with torch.inference_mode():
        tokens = random_tokens(count, layout.shape.vocab_size, device)
        positions = torch.arange(count, device=device)
        model.forward(ForwardInput(tokens, positions, meta, kv.layers, positions[-1:]))
        scales = scales_of_largest(kv.largest().cpu())
    logger.info(
        "scales of the KV cache, from %d tokens: keys %g to %g, values %g to %g",
        count, *(float(end) for of_kind in scales.unbind(1) for end in of_kind.aminmax()),
    )  # fmt: skip
    return layout._replace(scales=scales.to(device))


def scales_of_largest(largest: torch.Tensor) -> torch.Tensor:
    """Return power-of-two scales for the largest magnitudes; 1 where 0 or not finite."""
    exponents = torch.frexp(largest.float() * (HEADROOM / torch.finfo(FP8).max)).exponent
    ones = torch.ones_like(exponents, dtype=torch.float32)
    powers = torch.ldexp(ones, exponents.clamp(LEAST_EXPONENT, MOST_EXPONENT))
    return torch.where(largest.isfinite() & (largest > 0), powers, 1.0)
