"""Filters that few tokens pass: gather these from the row and search them in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from tidewheel_kernels.jit.vocabulary import crossing, element, load_logits, search

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def lower_bound(
    maxima, vocabulary, max_logit, total, scale, top_k, top_p, min_p, CHUNKS: tl.constexpr
):  # fmt: skip
    """Lower bound of the logits that all filters together keep.

    The k-th largest chunk maximum has k logits at or above it. All tokens below a logit L weigh at most
    ``vocabulary * exp((L - max) / T)``, which leaves top_p of the total if it is under 1 - top_p of it. With top_k
    and top_p on, only the first bound holds: top_p then needs the weight of every token that top_k keeps.
    """
    bound = LOWEST
    finite = maxima > float("-inf")
    if top_k <= tl.sum(finite.to(tl.int32), axis=0):
        lowest = tl.min(tl.where(finite, maxima, max_logit), axis=0)
        ones = tl.full([CHUNKS], 1.0, dtype=tl.float32)
        bound = search(maxima, ones, lowest, max_logit, top_k.to(tl.float32))
    # Rounded distances are widened a little.
    if (top_p < 1.0) & (top_k >= vocabulary):
        distance = tl.log2(vocabulary / ((1.0 - top_p) * total)) * 1.001 + 0.001
        bound = tl.maximum(bound, max_logit - distance / scale)
    if (min_p > 0.0) & ((top_p >= 1.0) | (top_k >= vocabulary)):
        distance = -tl.log2(min_p) * 1.001 + 0.001
        bound = tl.maximum(bound, max_logit - distance / scale)
    return tl.minimum(bound, max_logit)


@triton.jit
def gather(
    row_ptr, values_ptr, ids_ptr, chunks_ptr, vocabulary, maxima, bound,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Store logits >= bound and their ids, by id; return their number.

    Stops above CAPACITY. Reads only chunks that hold one.
    """
    wanted = maxima >= bound
    rank = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    tl.store(chunks_ptr + rank, tl.arange(0, CHUNKS), mask=wanted)
    num_wanted = tl.sum(wanted.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads read the list
    first = 0
    count = 0
    while (first < num_wanted) & (count <= CAPACITY):
        slot = first + tl.arange(0, CAPACITY // CHUNK)
        chunk = tl.load(chunks_ptr + slot, mask=slot < num_wanted, other=CHUNKS)
        column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = tl.reshape(load_logits(row_ptr, column, vocabulary), [CAPACITY])
        column = tl.reshape(column, [CAPACITY])
        kept = x >= bound
        position = count + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(values_ptr + position, x, mask=kept & (position < CAPACITY))
        tl.store(ids_ptr + position, column, mask=kept & (position < CAPACITY))
        count += tl.sum(kept.to(tl.int32), axis=0)
        first += CAPACITY // CHUNK
    tl.debug_barrier()
    return count


@triton.jit
def draw_from_candidates(
    values_ptr, ids_ptr, count, vocabulary, max_logit, total, scale, top_k, top_p, min_p, uniform,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """`draw_from_row` on candidates in registers: a search pass is two reductions."""
    slot = tl.arange(0, CAPACITY)
    x = tl.load(values_ptr + slot, mask=slot < count, other=float("-inf"))
    weight = tl.exp2((x - max_logit) * scale)
    threshold = tl.min(tl.where(slot < count, x, max_logit), axis=0)
    if top_k < vocabulary:
        ones = tl.full([CAPACITY], 1.0, dtype=tl.float32)
        threshold = search(x, ones, threshold, max_logit, top_k.to(tl.float32))
    if top_p < 1.0:
        if top_k < vocabulary:
            total = tl.sum(tl.where(x >= threshold, weight, 0.0), axis=0)
        threshold = search(x, weight, threshold, max_logit, top_p * total)
    weight = tl.where((x >= threshold) & (weight >= min_p), weight, 0.0)
    cumulative = tl.cumsum(weight, axis=0)
    target = uniform * element(cumulative, CAPACITY - 1, CAPACITY)
    return tl.load(ids_ptr + crossing(weight, cumulative, target, CAPACITY))
