import triton
import triton.language as tl

from tidewheel_kernels.triton_vocabulary import crossing, element, load_logits, middle, search

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def lower_bound(
    maxima, vocabulary, max_logit, total, scale, top_k, top_p, min_p, CHUNKS: tl.constexpr
):  # fmt: skip
    """Return a lower bound of the logits that all filters keep.

    The k-th largest chunk maximum has k logits at or above it. Tokens below a logit L weigh at most ``vocabulary *
    exp((L - max) / T)``: if that is under 1 - top_p of the total, top_p drops them. After top_k, top_p drops
    nothing here: it needs the weight of all that top_k keeps.
    """
    bound = LOWEST
    finite = maxima > float("-inf")
    if top_k <= tl.sum(finite.to(tl.int32), axis=0):
        lowest = tl.min(tl.where(finite, maxima, max_logit), axis=0)
        ones = tl.full([CHUNKS], 1.0, dtype=tl.float32)
        bound = search(maxima, ones, lowest, max_logit, top_k.to(tl.float32))
    # Widened, as distances are rounded.
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
    """Store logits >= bound with their ids, in order of ids, and return their number.

    A number above CAPACITY says only that not all fit.
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


@triton.jit
def _weight_from(row_ptr, vocabulary, threshold, max_logit, scale, BLOCK: tl.constexpr):
    weight = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = load_logits(row_ptr, start + tl.arange(0, BLOCK), vocabulary)
        weight += tl.where(x >= threshold, tl.exp2((x - max_logit) * scale), 0.0)
    return tl.sum(weight, axis=0)


@triton.jit
def _search_row(
    row_ptr, vocabulary, low, high, target, max_logit, scale, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
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
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.sum(_kept_weight(row_ptr, column, vocabulary, threshold, lowest_weight, max_logit, scale), axis=0)
    target = uniform * total

    # Equal sums end at `total`, so exactly one block holds the target.
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
    # The scan rounds differently from the sum.
    last = tl.max(tl.where(weight > 0.0, column, -1), axis=0)
    return tl.where(token < vocabulary, token, last)


@triton.jit
def draw_from_row(
    row_ptr, vocabulary, bound, max_logit, total, scale, top_k, top_p, min_p, uniform, BLOCK: tl.constexpr
):
    """Draw a token that passes the filters; its logit is at least `bound`."""
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
