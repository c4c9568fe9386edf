"""Sampling kernel: one program per row, thresholds found by search instead of a sort.

Every filter keeps the tokens at or above some logit, so the row is only ever streamed: each pass of a search halves
the interval that holds the threshold and then shrinks it to logits that occur, which ends after some ten passes for
usual rows, and exactly.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import vocabulary_config
from tidewheel_kernels.sampling import SamplingTensors
from tidewheel_kernels.sampling_reference import GREEDY_TEMPERATURE, greedy_tokens


@triton.jit
def _load_logits(row_ptr, column, vocabulary):
    return tl.load(row_ptr + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _statistics(row_ptr, vocabulary, BLOCK: tl.constexpr):
    """Largest and smallest logit above -inf, the first id of the largest, and whether the row can be sampled."""
    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    smallest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    largest_id = tl.zeros([BLOCK], dtype=tl.int32)
    num_nan = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _load_logits(row_ptr, column, vocabulary)
        num_nan += (x != x).to(tl.int32)
        largest_id = tl.where(x > largest, column, largest_id)
        largest = tl.where(x > largest, x, largest)
        smallest = tl.where((x > float("-inf")) & (x < smallest), x, smallest)
    max_logit = tl.max(largest, axis=0)
    token = tl.min(tl.where(largest == max_logit, largest_id, vocabulary), axis=0)
    usable = (tl.sum(num_nan, axis=0) == 0) & (max_logit > float("-inf")) & (max_logit < float("inf"))
    return max_logit, tl.min(smallest, axis=0), token, usable


@triton.jit
def _weight_from(row_ptr, vocabulary, threshold, max_logit, inverse_temperature, BLOCK: tl.constexpr):
    """Sum of ``exp((x - max) / temperature)`` over the logits x >= threshold."""
    weight = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = _load_logits(row_ptr, start + tl.arange(0, BLOCK), vocabulary)
        weight += tl.where(x >= threshold, tl.exp((x - max_logit) * inverse_temperature), 0.0)
    return tl.sum(weight, axis=0)


@triton.jit
def _search(
    row_ptr,
    vocabulary,
    low,
    high,
    target,
    max_logit,
    inverse_temperature,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest logit t of the row with measure{x >= t} >= target; measure is the count, or the weight.

    Both ends of [low, high] are logits of the row, the answer lies between them, and each pass drops at least one.
    """
    while low < high:
        # Halves are added because high - low may overflow. The middle of neighbours rounds to one of them.
        pivot = low * 0.5 + high * 0.5
        pivot = tl.where(pivot > low, pivot, high)
        measure = tl.zeros([BLOCK], dtype=tl.float32)
        lowest_above = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        highest_below = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for start in range(0, vocabulary, BLOCK):
            x = _load_logits(row_ptr, start + tl.arange(0, BLOCK), vocabulary)
            above = x >= pivot
            if BY_WEIGHT:
                measure += tl.where(above, tl.exp((x - max_logit) * inverse_temperature), 0.0)
            else:
                measure += tl.where(above, 1.0, 0.0)
            lowest_above = tl.where(above & (x < lowest_above), x, lowest_above)
            highest_below = tl.where((x < pivot) & (x > highest_below), x, highest_below)
        if tl.sum(measure, axis=0) >= target:
            low = tl.min(lowest_above, axis=0)
        else:
            high = tl.maximum(tl.max(highest_below, axis=0), low)
    return low


@triton.jit
def _kept_weight(row_ptr, column, vocabulary, threshold, lowest_weight, max_logit, inverse_temperature):
    x = _load_logits(row_ptr, column, vocabulary)
    weight = tl.exp((x - max_logit) * inverse_temperature)
    return tl.where((x >= threshold) & (weight >= lowest_weight), weight, 0.0)


@triton.jit
def _draw(
    row_ptr,
    vocabulary,
    threshold,
    lowest_weight,
    max_logit,
    inverse_temperature,
    uniform,
    fallback,
    BLOCK: tl.constexpr,
):
    """The first kept token whose cumulative weight exceeds ``uniform * total``."""
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.sum(
            _kept_weight(row_ptr, column, vocabulary, threshold, lowest_weight, max_logit, inverse_temperature),
            axis=0,
        )
    target = uniform * total

    # The same sums in the same order: they end at `total`, so the target falls into exactly one block.
    cumulative = 0.0
    before = 0.0
    first_column = 0
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        following = cumulative + tl.sum(
            _kept_weight(row_ptr, column, vocabulary, threshold, lowest_weight, max_logit, inverse_temperature),
            axis=0,
        )
        inside = (cumulative <= target) & (target < following)
        before = tl.where(inside, cumulative, before)
        first_column = tl.where(inside, start, first_column)
        cumulative = following

    column = first_column + tl.arange(0, BLOCK)
    weight = _kept_weight(row_ptr, column, vocabulary, threshold, lowest_weight, max_logit, inverse_temperature)
    hit = (before + tl.cumsum(weight, axis=0) > target) & (weight > 0.0)
    token = tl.min(tl.where(hit, column, vocabulary), axis=0)
    # The scan rounds differently from the sum and may end just short of the target.
    last = tl.max(tl.where(weight > 0.0, column, -1), axis=0)
    token = tl.where(token < vocabulary, token, last)
    return tl.where(token >= 0, token, fallback)


@triton.jit
def sample_kernel(
    logits_ptr,  # [num_rows, vocabulary]
    token_ptr,  # [num_rows] int64
    temperature_ptr,  # [num_rows]
    top_k_ptr,  # [num_rows]
    top_p_ptr,  # [num_rows]
    min_p_ptr,  # [num_rows]
    uniform_ptr,  # [num_rows]
    logits_stride,
    vocabulary,
    greedy_temperature,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: [num_rows]
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    max_logit, threshold, best, usable = _statistics(row_ptr, vocabulary, BLOCK)
    token = tl.where(usable, best, -1)
    temperature = tl.load(temperature_ptr + row)
    if usable & (temperature >= greedy_temperature):
        inverse_temperature = 1.0 / temperature
        if HAS_TOP_K:
            top_k = tl.load(top_k_ptr + row)
            if (top_k > 0) & (top_k < vocabulary):
                threshold = _search(
                    row_ptr, vocabulary, threshold, max_logit, top_k.to(tl.float32), max_logit, inverse_temperature,
                    False, BLOCK,
                )  # fmt: skip
        if HAS_TOP_P:
            top_p = tl.load(top_p_ptr + row)
            if top_p < 1.0:
                total = _weight_from(row_ptr, vocabulary, threshold, max_logit, inverse_temperature, BLOCK)
                threshold = _search(
                    row_ptr, vocabulary, threshold, max_logit, top_p * total, max_logit, inverse_temperature,
                    True, BLOCK,
                )  # fmt: skip
        lowest_weight = 0.0
        if HAS_MIN_P:
            lowest_weight = tl.load(min_p_ptr + row)
        uniform = tl.load(uniform_ptr + row)
        token = _draw(
            row_ptr, vocabulary, threshold, lowest_weight, max_logit, inverse_temperature, uniform, best, BLOCK
        )
    tl.store(token_ptr + row, token.to(tl.int64))


def sample(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> torch.Tensor:
    """Token ids [B] int64. An all-greedy batch is torch's reduction: it splits long rows over the device."""
    if not params.any_sampled:
        return greedy_tokens(logits).token_ids
    num_rows, vocabulary = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    config = vocabulary_config(vocabulary)
    sample_kernel[(num_rows,)](
        logits_ptr=logits,
        token_ptr=token_ids,
        temperature_ptr=params.temperature,
        top_k_ptr=params.top_k,
        top_p_ptr=params.top_p,
        min_p_ptr=params.min_p,
        uniform_ptr=uniform,
        logits_stride=logits.stride(0),
        vocabulary=vocabulary,
        greedy_temperature=GREEDY_TEMPERATURE,
        HAS_TOP_K=params.any_top_k,
        HAS_TOP_P=params.any_top_p,
        HAS_MIN_P=params.any_min_p,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )
    return token_ids
