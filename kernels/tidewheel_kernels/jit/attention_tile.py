"""Online softmax over tiles of keys from the paged cache, shared by all attention kernels."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def attend_tiles(
    q,  # [BLOCK_M, BLOCK_D]
    acc,  # [BLOCK_M, BLOCK_D] float32, weighted sum of values so far
    row_max,  # [BLOCK_M] float32, in units of log2
    row_sum,  # [BLOCK_M] float32
    query_position,  # [BLOCK_M]
    seq_len,
    first_tile,
    end_tile,
    block_table_ptr,  # [max_blocks] of this sequence
    k_ptr,  # [num_blocks, BLOCK_SIZE, head_dim] of this KV head
    v_ptr,  # [num_blocks, BLOCK_SIZE, head_dim] of this KV head
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
    """Attend to the keys of tiles [first_tile, end_tile); return (acc, row_max, row_sum).

    Without MASKED, every row must see every key. `logit_scale` includes log2(e), for exp2. With a soft cap it
    includes 2 log2(e) / soft_cap, the exponent of tanh.
    """
    column = tl.arange(0, BLOCK_D)[None, :]
    # The block of a tile is loaded one tile ahead, so that keys and values depend on no load of their own iteration
    # and get all pipeline stages. Entries past the sequence's last block may not exist.
    next_block = tl.load(block_table_ptr + first_tile * BLOCK_N // BLOCK_SIZE, mask=first_tile < end_tile, other=0)
    for tile in range(first_tile, end_tile):
        # BLOCK_N divides BLOCK_SIZE: a tile lies in one block.
        first_key = tile * BLOCK_N
        block = next_block.to(tl.int64)
        next_block = tl.load(block_table_ptr + tl.minimum(tile + 1, end_tile - 1) * BLOCK_N // BLOCK_SIZE)
        offset = (first_key % BLOCK_SIZE + tl.arange(0, BLOCK_N))[:, None]
        key = first_key + tl.arange(0, BLOCK_N)
        k_tile_ptr = k_ptr + block * k_block_stride + offset * k_offset_stride + column
        v_tile_ptr = v_ptr + block * v_block_stride + offset * v_offset_stride + column
        if MASKED:
            # Slots past the end may hold NaN, which a zero weight would not remove.
            mask = (key[:, None] < seq_len) & (column < HEAD_DIM)
            k = tl.load(k_tile_ptr, mask=mask, other=0.0)
            v = tl.load(v_tile_ptr, mask=mask, other=0.0)
        elif BLOCK_D == HEAD_DIM:
            k = tl.load(k_tile_ptr)
            v = tl.load(v_tile_ptr)
        else:
            k = tl.load(k_tile_ptr, mask=column < HEAD_DIM, other=0.0)
            v = tl.load(v_tile_ptr, mask=column < HEAD_DIM, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        acc, row_max, row_sum = _attend(
            logits, v, acc, row_max, row_sum, key, query_position, logit_scale, soft_cap_log2, sliding_window,
            MASKED, HAS_SOFT_CAP, HAS_WINDOW,
        )  # fmt: skip
    return acc, row_max, row_sum


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
    """[BLOCK_M, BLOCK_N] float32: unscaled logits of `first_tile`, for `attend_boxes`."""
    first_key = first_tile * BLOCK_N
    block = tl.load(block_table_ptr + first_key // BLOCK_SIZE)
    k = k_cache.load([block, first_key % BLOCK_SIZE, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
    return tl.dot(q, tl.trans(k))


@triton.jit
def attend_boxes(
    q,  # [BLOCK_M, BLOCK_D], of 16 bits
    logits,  # [BLOCK_M, BLOCK_N] float32, unscaled, of first_tile
    acc,  # [BLOCK_M, BLOCK_D] float32, weighted sum of values so far
    row_max,  # [BLOCK_M] float32, in units of log2
    row_sum,  # [BLOCK_M] float32
    query_position,  # [BLOCK_M]
    seq_len,
    first_tile,
    end_tile,
    last_tile,  # of the sequence: nothing later is read
    block_table_ptr,  # [max_blocks] of this sequence
    k_cache,  # descriptor of [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim], boxes of [1, BLOCK_N, 1, BLOCK_D]
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
    """`attend_tiles` on TMA boxes; returns (logits of end_tile, acc, ...).

    The query-key product runs one tile ahead, so that tensor cores work during the softmax (FlashAttention-3, Shah et
    al. 2024, section 3.2). Columns past head_dim are zeros.
    """
    k_block = tl.load(block_table_ptr + tl.minimum(first_tile + 1, last_tile) * BLOCK_N // BLOCK_SIZE)
    v_block = tl.load(block_table_ptr + tl.minimum(first_tile, last_tile) * BLOCK_N // BLOCK_SIZE)
    for tile in range(first_tile, end_tile):
        next_key = tl.minimum(tile + 1, last_tile) * BLOCK_N
        k = k_cache.load([k_block, next_key % BLOCK_SIZE, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
        v = v_cache.load([v_block, tile * BLOCK_N % BLOCK_SIZE, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
        # Two loads: the pipeliner refuses loops that carry a value over two iterations.
        k_block = tl.load(block_table_ptr + tl.minimum(tile + 2, last_tile) * BLOCK_N // BLOCK_SIZE)
        v_block = tl.load(block_table_ptr + next_key // BLOCK_SIZE)
        next_logits = tl.dot(q, tl.trans(k))
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if MASKED:
            # A box is copied whole: values past the end may be NaN, which a zero weight would not remove.
            v = tl.where(key[:, None] < seq_len, v, 0.0)
        acc, row_max, row_sum = _attend(
            logits, v, acc, row_max, row_sum, key, query_position, logit_scale, soft_cap_log2, sliding_window,
            MASKED, HAS_SOFT_CAP, HAS_WINDOW,
        )  # fmt: skip
        logits = next_logits
    return logits, acc, row_max, row_sum


@triton.jit
def _attend(
    logits,  # [BLOCK_M, BLOCK_N] float32, unscaled
    v,  # [BLOCK_N, BLOCK_D], free of NaN
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
    """Extend the online softmax by one tile (Milakov and Gimelshein 2018)."""
    scale = logit_scale
    if HAS_SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both ends: exp2 gives inf or 0 there.
        logits = 1.0 - 2.0 / (tl.exp2(logits * logit_scale) + 1.0)
        scale = soft_cap_log2
    if MASKED:
        visible = key[None, :] <= query_position[:, None]
        if HAS_WINDOW:
            visible = visible & (key[None, :] > query_position[:, None] - sliding_window)
        logits = tl.where(visible, logits, float("-inf"))

    # The scale is positive, so it follows the maximum and joins the subtraction in one instruction.
    new_max = tl.maximum(row_max, tl.max(logits, axis=1) * scale)
    base = new_max
    if MASKED:
        # In a row without keys so far, -inf - -inf would be NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(logits * scale - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum
