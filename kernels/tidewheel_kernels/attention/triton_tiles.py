"""Online softmax over tiles of keys (Milakov and Gimelshein 2018).

State in float32: weighted values `acc` [BLOCK_M, BLOCK_D], largest logits `row_max` [BLOCK_M] in log2 units, weights
`row_sum` [BLOCK_M].
"""

import triton
import triton.language as tl


@triton.jit
def empty_softmax(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    return acc, row_max, row_sum


@triton.jit
def for_cache(q, scales_ptr, kv_head, num_kv_heads, stored: tl.constexpr):
    """Return queries in the dtype of products with cached keys, and the scales of a head's keys and values.

    For 8-bit keys bfloat16 becomes float16: two keys convert in one instruction, not four.
    """
    k_scale = 1.0
    v_scale = 1.0
    if stored == tl.float8e4nv:
        k_scale = tl.load(scales_ptr + kv_head)
        v_scale = tl.load(scales_ptr + num_kv_heads + kv_head)
        if q.dtype == tl.bfloat16:
            q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return q, k_scale, v_scale


@triton.jit
def attend_tiles(
    q,  # [BLOCK_M, BLOCK_D]
    acc,
    row_max,
    row_sum,
    query_position,  # [BLOCK_M]
    seq_len,
    first_tile,
    end_tile,
    block_table_ptr,  # [max_blocks] of this sequence
    k_ptr,  # [num_blocks, BLOCK_SIZE, head_dim]
    v_ptr,  # like k_ptr
    k_block_stride,
    k_offset_stride,
    v_block_stride,
    v_offset_stride,
    logit_scale,
    soft_cap_log2,
    sliding_window,
    MASKED: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to tiles [first_tile, end_tile); without MASKED, every row sees all keys.

    `logit_scale` includes log2(e) for exp2; with a soft cap, 2 log2(e) / soft_cap for tanh.
    """
    column = tl.arange(0, BLOCK_D)[None, :]
    # Blocks are loaded one tile ahead, so that keys and values get all pipeline stages.
    next_block = tl.load(block_table_ptr + first_tile * BLOCK_N // BLOCK_SIZE, mask=first_tile < end_tile, other=0)
    for tile in range(first_tile, end_tile):
        first_key = tile * BLOCK_N
        block = next_block.to(tl.int64)
        next_block = tl.load(block_table_ptr + tl.minimum(tile + 1, end_tile - 1) * BLOCK_N // BLOCK_SIZE)
        offset = (first_key % BLOCK_SIZE + tl.arange(0, BLOCK_N))[:, None]
        key = first_key + tl.arange(0, BLOCK_N)
        k_tile_ptr = k_ptr + block * k_block_stride + offset * k_offset_stride + column
        v_tile_ptr = v_ptr + block * v_block_stride + offset * v_offset_stride + column
        k = _load_tile(k_tile_ptr, key, column, seq_len, MASKED, HEAD_DIM, BLOCK_D).to(q.dtype)
        v = _load_tile(v_tile_ptr, key, column, seq_len, MASKED, HEAD_DIM, BLOCK_D).to(q.dtype)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        acc, row_max, row_sum = _attend(
            logits, v, acc, row_max, row_sum, key, query_position, logit_scale, soft_cap_log2, sliding_window,
            MASKED, HAS_SOFT_CAP, HAS_WINDOW,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def _load_tile(tile_ptr, key, column, seq_len, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    if MASKED:
        # Slots past the end may hold NaN.
        tile = tl.load(tile_ptr, mask=(key[:, None] < seq_len) & (column < HEAD_DIM), other=0.0)
    elif BLOCK_D == HEAD_DIM:
        tile = tl.load(tile_ptr)
    else:
        tile = tl.load(tile_ptr, mask=column < HEAD_DIM, other=0.0)
    return tile


@triton.jit
def store_rows(row_ptr, acc, row_sum, v_scale, mask):
    """Store values divided by weights, zero for a row without keys."""
    result = acc * v_scale / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(row_ptr, result.to(row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def first_logits(
    q,
    first_tile,
    block_table_ptr,
    k_cache,
    kv_head,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first_key = first_tile * BLOCK_N
    block = tl.load(block_table_ptr + first_key // BLOCK_SIZE)
    k = k_cache.load([block, first_key % BLOCK_SIZE, kv_head, 0]).reshape(BLOCK_N, BLOCK_D).to(q.dtype)
    return tl.dot(q, tl.trans(k))


@triton.jit
def attend_boxes(
    q,  # [BLOCK_M, BLOCK_D], 16 bits
    logits,  # [BLOCK_M, BLOCK_N] of first_tile, unscaled
    acc,
    row_max,
    row_sum,
    query_position,  # [BLOCK_M]
    seq_len,
    first_tile,
    end_tile,
    last_tile,
    block_table_ptr,  # [max_blocks] of this sequence
    k_cache,  # descriptor, [1, BLOCK_N, 1, BLOCK_D]
    v_cache,  # like k_cache
    kv_head,
    logit_scale,
    soft_cap_log2,
    sliding_window,
    MASKED: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to tiles loaded by TMA; query-key products run one tile ahead (FlashAttention-3, section 3.2)."""
    k_block = tl.load(block_table_ptr + tl.minimum(first_tile + 1, last_tile) * BLOCK_N // BLOCK_SIZE)
    v_block = tl.load(block_table_ptr + tl.minimum(first_tile, last_tile) * BLOCK_N // BLOCK_SIZE)
    for tile in range(first_tile, end_tile):
        next_key = tl.minimum(tile + 1, last_tile) * BLOCK_N
        k = k_cache.load([k_block, next_key % BLOCK_SIZE, kv_head, 0]).reshape(BLOCK_N, BLOCK_D).to(q.dtype)
        v = v_cache.load([v_block, tile * BLOCK_N % BLOCK_SIZE, kv_head, 0]).reshape(BLOCK_N, BLOCK_D).to(q.dtype)
        # The pipeliner refuses loops that carry a value over two iterations.
        k_block = tl.load(block_table_ptr + tl.minimum(tile + 2, last_tile) * BLOCK_N // BLOCK_SIZE)
        v_block = tl.load(block_table_ptr + next_key // BLOCK_SIZE)
        next_logits = tl.dot(q, tl.trans(k))
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if MASKED:
            # See `_load_tile`.
            v = tl.where(key[:, None] < seq_len, v, 0.0)
        acc, row_max, row_sum = _attend(
            logits, v, acc, row_max, row_sum, key, query_position, logit_scale, soft_cap_log2, sliding_window,
            MASKED, HAS_SOFT_CAP, HAS_WINDOW,
        )  # fmt: skip
        logits = next_logits
    return logits, acc, row_max, row_sum


@triton.jit
def _attend(
    logits,  # [BLOCK_M, BLOCK_N] unscaled
    v,  # [BLOCK_N, BLOCK_D]
    acc,
    row_max,
    row_sum,
    key,  # [BLOCK_N] positions
    query_position,  # [BLOCK_M]
    logit_scale,
    soft_cap_log2,
    sliding_window,
    MASKED: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    scale = logit_scale
    if HAS_SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), also where exp2 gives inf or 0.
        logits = 1.0 - 2.0 / (tl.exp2(logits * logit_scale) + 1.0)
        scale = soft_cap_log2
    if MASKED:
        visible = key[None, :] <= query_position[:, None]
        if HAS_WINDOW:
            visible = visible & (key[None, :] > query_position[:, None] - sliding_window)
        logits = tl.where(visible, logits, float("-inf"))

    # A positive scale may follow the maximum, in the subtraction.
    new_max = tl.maximum(row_max, tl.max(logits, axis=1) * scale)
    base = new_max
    if MASKED:
        # Without keys, -inf - -inf would be NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(logits * scale - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum
