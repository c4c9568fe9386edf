"""Passes over a row of logits whose filters keep more tokens than fit in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from tidewheel_kernels.jit.vocabulary import load_logits, middle


@triton.jit
def _weight_from(row_ptr, vocabulary, threshold, max_logit, scale, BLOCK: tl.constexpr):
    """Sum of ``exp2((x - max) * scale)`` over logits x >= threshold."""
    weight = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = load_logits(row_ptr, start + tl.arange(0, BLOCK), vocabulary)
        weight += tl.where(x >= threshold, tl.exp2((x - max_logit) * scale), 0.0)
    return tl.sum(weight, axis=0)


@triton.jit
def _search_row(
    row_ptr, vocabulary, low, high, target, max_logit, scale, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """`search` over a row in memory, by count or weight, in some ten to twenty passes."""
    while low < high:
        pivot = middle(low, high)
        measure = tl.zeros([BLOCK], dtype=tl.float32)
        lowest_above = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        highest_below = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for start in range(0, vocabulary, BLOCK):
            x = load_logits(row_ptr, start + tl.arange(0, BLOCK), vocabulary)
            above = x >= pivot
            if BY_WEIGHT:
                measure += tl.where(above, tl.exp2((x - max_logit) * scale), 0.0)
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
def _kept_weight(row_ptr, column, vocabulary, threshold, lowest_weight, max_logit, scale):
    x = load_logits(row_ptr, column, vocabulary)
    weight = tl.exp2((x - max_logit) * scale)
    return tl.where((x >= threshold) & (weight >= lowest_weight), weight, 0.0)


@triton.jit
def _draw_kept(
    row_ptr, vocabulary, threshold, lowest_weight, max_logit, scale, uniform, BLOCK: tl.constexpr
):  # fmt: skip
    """First kept token whose cumulative weight exceeds ``uniform * total``."""
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.sum(_kept_weight(row_ptr, column, vocabulary, threshold, lowest_weight, max_logit, scale), axis=0)
    target = uniform * total

    # The same sums in the same order end at `total`, so the target falls into exactly one block.
    cumulative = 0.0
    before = 0.0
    first_column = 0
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        following = cumulative + tl.sum(
            _kept_weight(row_ptr, column, vocabulary, threshold, lowest_weight, max_logit, scale), axis=0
        )
        inside = (cumulative <= target) & (target < following)
        before = tl.where(inside, cumulative, before)
        first_column = tl.where(inside, start, first_column)
        cumulative = following

    column = first_column + tl.arange(0, BLOCK)
    weight = _kept_weight(row_ptr, column, vocabulary, threshold, lowest_weight, max_logit, scale)
    hit = (before + tl.cumsum(weight, axis=0) > target) & (weight > 0.0)
    token = tl.min(tl.where(hit, column, vocabulary), axis=0)
    # The scan rounds differently from the sum and may end just short of the target.
    last = tl.max(tl.where(weight > 0.0, column, -1), axis=0)
    return tl.where(token < vocabulary, token, last)


@triton.jit
def draw_from_row(
    row_ptr, vocabulary, bound, max_logit, total, scale, top_k, top_p, min_p, uniform, BLOCK: tl.constexpr
):
    """Token drawn from those that pass the filters; `bound` is at most their lowest logit."""
    threshold = bound
    if top_k < vocabulary:
        threshold = _search_row(
            row_ptr, vocabulary, threshold, max_logit, top_k.to(tl.float32), max_logit, scale, False, BLOCK
        )
    if top_p < 1.0:
        if top_k < vocabulary:
            total = _weight_from(row_ptr, vocabulary, threshold, max_logit, scale, BLOCK)
        threshold = _search_row(
            row_ptr, vocabulary, threshold, max_logit, top_p * total, max_logit, scale, True, BLOCK
        )
    return _draw_kept(row_ptr, vocabulary, threshold, min_p, max_logit, scale, uniform, BLOCK)
