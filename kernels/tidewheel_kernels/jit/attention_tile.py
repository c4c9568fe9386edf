"""The part that both attention kernels share: an online softmax over tiles of keys from the paged cache."""

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
    """Attends to the keys of tiles [first_tile, end_tile); returns (acc, row_max, row_sum).

    Without MASKED, every row must see every key of these tiles. `logit_scale` includes log2(e) (so that exp2 does for
    exp), or 2 log2(e) / soft_cap with a soft cap (so that it is the exponent of tanh).
    """
    column = tl.arange(0, BLOCK_D)[None, :]
    for tile in range(first_tile, end_tile):
        # BLOCK_N divides BLOCK_SIZE: a tile lies in one block.
        first_key = tile * BLOCK_N
        block = tl.load(block_table_ptr + first_key // BLOCK_SIZE).to(tl.int64)
        offset = (first_key % BLOCK_SIZE + tl.arange(0, BLOCK_N))[:, None]
        key = first_key + tl.arange(0, BLOCK_N)
        k_tile_ptr = k_ptr + block * k_block_stride + offset * k_offset_stride + column
        v_tile_ptr = v_ptr + block * v_block_stride + offset * v_offset_stride + column
        if MASKED:
            # Slots past the end may hold NaN, which a weight of zero would not remove.
            mask = (key[:, None] < seq_len) & (column < HEAD_DIM)
            k = tl.load(k_tile_ptr, mask=mask, other=0.0)
            v = tl.load(v_tile_ptr, mask=mask, other=0.0)
        elif BLOCK_D == HEAD_DIM:
            k = tl.load(k_tile_ptr)
            v = tl.load(v_tile_ptr)
        else:
            k = tl.load(k_tile_ptr, mask=column < HEAD_DIM, other=0.0)
            v = tl.load(v_tile_ptr, mask=column < HEAD_DIM, other=0.0)

        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * logit_scale
        if HAS_SOFT_CAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both ends: exp2 gives inf or 0 there.
            logits = soft_cap_log2 * (1.0 - 2.0 / (tl.exp2(logits) + 1.0))
        if MASKED:
            visible = key[None, :] <= query_position[:, None]
            if HAS_WINDOW:
                visible = visible & (key[None, :] > query_position[:, None] - sliding_window)
            logits = tl.where(visible, logits, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(logits, axis=1))
        base = new_max
        if MASKED:
            # A row that has seen no key yet: -inf - -inf would be NaN.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(logits - base[:, None])
        decay = tl.exp2(row_max - base)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum
