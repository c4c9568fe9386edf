"""Split-KV decode attention: programs share one query's keys, and a second kernel merges their results.

Flash-decoding (Dao et al. 2023). Row i of q belongs to sequence i.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from tidewheel_kernels.jit.attention_tile import attend_tiles

_INDEX_TENSORS = ["block_tables_ptr", "seq_lens_ptr"]


@triton.jit
def _split_tiles(seq_len, num_splits, sliding_window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """(first, end, per_split): visible key tiles, and tiles per split.

    Splits follow the actual length, so work stays even with a grid frozen for the longest.
    """
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - sliding_window, 0) // BLOCK_N
    end = tl.cdiv(seq_len, BLOCK_N)
    return first, end, tl.cdiv(end - first, num_splits)


@triton.jit(do_not_specialize_on_alignment=_INDEX_TENSORS)
def decode_attention_kernel(
    q_ptr,  # [num_seqs, num_q_heads, head_dim]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    out_ptr,  # [num_seqs, num_q_heads, head_dim], or float32 [num_seqs, num_q_heads, num_splits, head_dim]
    log2_sum_ptr,  # [num_seqs, num_q_heads, num_splits] float32; written with SPLIT
    block_tables_ptr,  # [num_seqs, max_blocks]
    seq_lens_ptr,  # [num_seqs]
    logit_scale,
    soft_cap_log2,
    sliding_window,
    num_q_heads,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    block_table_stride,
    k_block_stride,
    k_offset_stride,
    k_head_stride,
    v_block_stride,
    v_offset_stride,
    v_head_stride,
    SPLIT: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: [num_kv_heads, num_seqs, num_splits]; heads first, as the heads of a slot are adjacent in memory
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    first_tile, num_tiles, tiles_per_split = _split_tiles(seq_len, num_splits, sliding_window, BLOCK_N, HAS_WINDOW)
    begin_tile = first_tile + split * tiles_per_split
    end_tile = tl.minimum(begin_tile + tiles_per_split, num_tiles)
    # The merge knows which splits have keys; an empty one writes nothing.
    if SPLIT and begin_tile >= end_tile:
        return

    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < GROUP)[:, None] & (column < HEAD_DIM)
    q_row_ptr = q_ptr + seq * q_token_stride + head[:, None] * q_head_stride
    q = tl.load(q_row_ptr + column, mask=mask, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    query_position = tl.zeros([BLOCK_M], dtype=tl.int32) + (seq_len - 1)
    # One loop that masks every tile: the kernel is bandwidth-bound, and a second loop would refill the pipeline.
    acc, row_max, row_sum = attend_tiles(
        q, acc, row_max, row_sum, query_position, seq_len, begin_tile, end_tile,
        block_tables_ptr + seq * block_table_stride,
        k_cache_ptr + kv_head * k_head_stride, v_cache_ptr + kv_head * v_head_stride,
        k_block_stride, k_offset_stride, v_block_stride, v_offset_stride, logit_scale, soft_cap_log2, sliding_window,
        True, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    # Padding has no keys: its row is zero.
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    result = acc / safe_sum[:, None]
    if SPLIT:
        partial = (seq * num_q_heads + head) * num_splits + split
        tl.store(log2_sum_ptr + partial, row_max + tl.log2(safe_sum), mask=row < GROUP)
        tl.store(out_ptr + partial[:, None] * HEAD_DIM + column, result, mask=mask)
    else:
        out_row_ptr = out_ptr + seq * out_token_stride + head[:, None] * out_head_stride
        tl.store(out_row_ptr + column, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=_INDEX_TENSORS)
def merge_splits_kernel(
    partial_ptr,  # [num_seqs, num_q_heads, num_splits, head_dim] float32
    log2_sum_ptr,  # [num_seqs, num_q_heads, num_splits] float32
    out_ptr,  # [num_seqs, num_q_heads, head_dim]
    seq_lens_ptr,  # [num_seqs]
    sliding_window,
    num_splits,
    out_token_stride,
    out_head_stride,
    HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: [num_q_heads, num_seqs]
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    first = (seq * tl.num_programs(0) + head) * num_splits
    seq_len = tl.load(seq_lens_ptr + seq)
    first_tile, num_tiles, tiles_per_split = _split_tiles(seq_len, num_splits, sliding_window, BLOCK_N, HAS_WINDOW)
    num_filled = tl.cdiv(num_tiles - first_tile, tl.maximum(tiles_per_split, 1))

    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    total = 0.0
    largest = float("-inf")
    for chunk in range(0, num_filled, BLOCK_SPLITS):
        split = chunk + tl.arange(0, BLOCK_SPLITS)
        # Both loads depend on the length only, so neither waits for the other.
        log2_sum = tl.load(log2_sum_ptr + first + split, mask=split < num_filled, other=float("-inf"))
        partial = tl.load(
            partial_ptr + (first + split)[:, None] * HEAD_DIM + column[None, :],
            mask=(split < num_filled)[:, None] & (column < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(log2_sum, axis=0))
        weight = tl.exp2(log2_sum - new_largest)
        decay = tl.exp2(largest - new_largest)
        acc = acc * decay + tl.sum(partial * weight[:, None], axis=0)
        total = total * decay + tl.sum(weight, axis=0)
        largest = new_largest
    result = acc / tl.where(total == 0.0, 1.0, total)
    out_row_ptr = out_ptr + seq * out_token_stride + head * out_head_stride
    tl.store(out_row_ptr + column, result.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)
