"""Memory of a step: measured on a GPU, estimated on a CPU.

Graphs point into the cache, so they come after it; the largest are captured before to estimate all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import ModelShape
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.kv_tensors import MemoryBudget, limited_budget
from tidewheel.runner.sampling_plan import SCORED_AT_ONCE
from tidewheel.settings import MIB

T = TypeVar("T")


class StepMemory(NamedTuple):
    activations: int  # bytes
    graphs: int


class StepSize(NamedTuple):
    num_rows: int
    tokens_per_row: int

    def num_blocks(self, block_size: int) -> int:
        return -(-self.tokens_per_row // block_size)


def largest_step(info: RunnerInfo) -> StepSize:
    num_rows = min(info.max_num_seqs, info.max_num_batched_tokens)
    return StepSize(num_rows, max(1, min(info.max_num_batched_tokens // num_rows, info.max_model_len - 1)))


def smallest_step(info: RunnerInfo) -> StepSize:
    return StepSize(1, min(2, info.max_model_len))


def estimated_activation_bytes(size: StepSize, shape: ModelShape, dtype: torch.dtype) -> int:
    """Return the bytes of the widest tensors: residual, norm, gate, up and product of a layer, and logits twice."""
    per_token = (2 * shape.hidden_size + 3 * shape.intermediate_size) * dtype.itemsize
    num_tokens = size.num_rows * size.tokens_per_row
    per_logit = dtype.itemsize + torch.float32.itemsize
    sampled = size.num_rows * (per_logit + torch.int32.itemsize)
    scored = min(num_tokens, SCORED_AT_ONCE) * per_logit
    return num_tokens * per_token + shape.vocab_size * max(sampled, scored)


def measured_activation_bytes(
    run: Callable[[StepSize], T], size: StepSize, device: torch.device, num_ranks: int
) -> tuple[T, int]:
    """Return `run`'s result and its peak memory in bytes. Raise `ConfigError`, naming settings that fit."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = _run_if_it_fits(run, size)
    if result is None:
        raise ConfigError(_what_fits(run, size, before, num_ranks))
    return result, torch.cuda.max_memory_allocated(device) - before


def _run_if_it_fits(run: Callable[[StepSize], T], size: StepSize) -> T | None:
    try:
        return run(size)
    except torch.OutOfMemoryError:
        return None


def _what_fits(run: Callable[[StepSize], object], size: StepSize, weights_bytes: int, num_ranks: int) -> str:
    obstacle = f"a step of {size.num_rows} requests with {size.tokens_per_row} tokens each does not fit on the GPU"
    beside = f"{obstacle} beside {weights_bytes // MIB} MiB of weights"
    if num_ranks > 1:  # the others are inside this step, and would not take part in a smaller one
        return f"{beside}: lower max_num_batched_tokens or max_num_seqs"
    num_rows, length = size
    while num_rows and _run_if_it_fits(run, StepSize(num_rows, length)) is None:
        num_rows, length = (num_rows, length // 2) if length > 1 else (num_rows // 2, 1)
        torch.cuda.empty_cache()
    if not num_rows:
        return f"{beside}, nor does a step of one token: use a larger GPU, or stop what else runs on it"
    if num_rows < size.num_rows:
        return f"{beside}: set max_num_seqs and max_num_batched_tokens to at most {num_rows}"
    return f"{beside}: set max_num_batched_tokens to at most {num_rows * length}"


def estimated_graph_bytes(taken: Sequence[int], num_sizes: int) -> int:
    """Estimate the bytes of all graphs: the first pays for the pool, the others count as max(`taken[1:]`) each."""
    return sum(taken[:1]) + max(num_sizes - 1, 0) * max(taken[1:], default=0)


def gpu_budget(config: EngineConfig, needs: Mapping[str, int], device: torch.device) -> MemoryBudget:
    """Return what the engine's share leaves for the cache. `needs`: other bytes by name, not taken yet."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    own, coming = torch.cuda.memory_reserved(device), sum(needs.values())
    if (share := config.device_memory_share) is not None:
        return limited_budget(share, total, own + coming, free - coming, is_of_gpu=True)
    fraction, taken = config.gpu_memory_utilization, total - free
    others = taken - own
    needed = " and ".join(f"{name} need {size // MIB}" for name, size in needs.items())
    source = (
        f"gpu_memory_utilization {fraction} of {total // MIB} MiB ({taken // MIB} are taken, {others // MIB} of them "
        f"by CUDA itself and other programs, and {needed})"
    )
    allowed = left_of_utilization(fraction, total, taken, coming)
    return MemoryBudget(allowed, source, "gpu_memory_utilization", total, fraction)


def left_of_utilization(fraction: float, total: int, taken: int, coming: int) -> int:
    """Return the bytes for a cache by `gpu_memory_utilization`, which counts what all programs have taken."""
    return int(total * fraction) - taken - coming
