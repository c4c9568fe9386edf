import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_logits(row_ptr, column, vocabulary):
    return tl.load(row_ptr + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def load_tile(row_ptr, first_chunk, vocabulary, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Return [TILE, CHUNK] logits, -inf past the row's end."""
    chunk = first_chunk + tl.arange(0, TILE)
    return load_logits(row_ptr, chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :], vocabulary)


@triton.jit
def chunk_maxima(x):
    """Return [TILE] maxima of logits `x` [TILE, CHUNK]; NaN for a row with NaN."""
    num_nan = tl.sum((x != x).to(tl.int32), axis=1)
    return tl.where(num_nan > 0, float("nan"), tl.max(x, axis=1))


@triton.jit
def chunk_weights(x, maxima, scale):
    """Return [TILE] sums of ``exp2((x - maximum) * scale)`` over the second axis of `x` [TILE, CHUNK]."""
    origin = tl.where(maxima == float("-inf"), 0.0, maxima)
    return tl.sum(tl.exp2((x - origin[:, None]) * scale), axis=1)


@triton.jit
def load_maxima(maxima_ptr, num_chunks, CHUNKS: tl.constexpr):
    """Return chunk maxima, the largest, and whether the row has no NaN or +inf, and a finite logit."""
    chunk = tl.arange(0, CHUNKS)
    maxima = tl.load(maxima_ptr + chunk, mask=chunk < num_chunks, other=float("-inf"))
    max_logit = tl.max(maxima, axis=0)
    num_nan = tl.sum((maxima != maxima).to(tl.int32), axis=0)
    usable = (num_nan == 0) & (max_logit > float("-inf")) & (max_logit < float("inf"))
    return maxima, max_logit, usable


@triton.jit
def middle(low, high):
    # high - low may overflow.
    pivot = low * 0.5 + high * 0.5
    return tl.where(pivot > low, pivot, high)


@triton.jit
def search(x, measure, low, high, target):
    """Return the largest t in `x` where `measure`, summed over x >= t, reaches `target`, or `low`.

    `high` is the largest element of `x`.
    """
    while low < high:
        pivot = middle(low, high)
        above = x >= pivot
        if tl.sum(tl.where(above, measure, 0.0), axis=0) >= target:
            low = tl.min(tl.where(above, x, float("inf")), axis=0)
        else:
            high = tl.maximum(tl.max(tl.where(above, float("-inf"), x), axis=0), low)
    return low


@triton.jit
def element(values, index, SIZE: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, values, 0.0), axis=0)


@triton.jit
def crossing(weight, cumulative, target, SIZE: tl.constexpr):
    """Return the first weighted lane whose `cumulative` exceeds `target`, else the last."""
    lane = tl.arange(0, SIZE)
    first = tl.min(tl.where((cumulative > target) & (weight > 0.0), lane, SIZE), axis=0)
    last = tl.max(tl.where(weight > 0.0, lane, 0), axis=0)
    return tl.where(first < SIZE, first, last)
