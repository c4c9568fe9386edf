"""Attention of sequences with any number of queries: one program per tile of queries and KV head."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from tidewheel_kernels.jit.attention_tile import attend_tiles


@triton.jit
def _sequence_of_tile(cu_seqlens_ptr, first_row, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence whose range of tiles holds `tile`.

    Sequence i is given the tiles from ``start_i // BLOCK_Q + i`` on, which always suffices and needs no prefix sum of
    tile counts; so the grid is known on the host from the number of rows alone.
    """
    left = 0
    right = num_seqs
    while left < right:
        middle = (left + right) // 2
        start = tl.load(cu_seqlens_ptr + middle) - first_row
        if start // BLOCK_Q + middle <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


# Values that change with every batch must not make the compiler specialise, and compile again while serving.
@triton.jit(do_not_specialize=["first_seq", "num_seqs"])
def prefill_attention_kernel(
    q_ptr,  # [num_tokens, num_q_heads, head_dim]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    out_ptr,  # [num_tokens, num_q_heads, head_dim]
    block_tables_ptr,  # [first_seq + num_seqs, max_blocks]
    cu_seqlens_ptr,  # [first_seq + num_seqs + 1]
    seq_lens_ptr,  # [first_seq + num_seqs]
    logit_scale,
    soft_cap_log2,
    sliding_window,
    first_seq,
    num_seqs,
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
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: [num_rows // BLOCK_Q + num_seqs, num_kv_heads], for the num_rows queries from sequence first_seq on
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Later tiles of a sequence have more keys: the longest programs start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    first_row = tl.load(cu_seqlens_ptr + first_seq)
    nth = _sequence_of_tile(cu_seqlens_ptr + first_seq, first_row, tile, num_seqs, BLOCK_Q)
    seq = first_seq + nth
    start = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - start
    first_query = (tile - (start - first_row) // BLOCK_Q - nth) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)

    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = ((row < BLOCK_Q * GROUP) & (query < query_len))[:, None] & (column < HEAD_DIM)
    token = (start + query).to(tl.int64)
    q_row_ptr = q_ptr + token[:, None] * q_token_stride + head[:, None] * q_head_stride
    q = tl.load(q_row_ptr + column, mask=mask, other=0.0)

    context_len = seq_len - query_len
    end_key = tl.minimum(context_len + first_query + BLOCK_Q, seq_len)
    end_tile = tl.cdiv(end_key, BLOCK_N)
    # Every row of the tile sees the keys up to the position of its first query.
    first_tile = 0
    masked_tile = (context_len + first_query + 1) // BLOCK_N
    if HAS_WINDOW:
        first_tile = tl.maximum(context_len + first_query - sliding_window + 1, 0) // BLOCK_N
        masked_tile = first_tile

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * block_table_stride
    k_ptr = k_cache_ptr + kv_head * k_head_stride
    v_ptr = v_cache_ptr + kv_head * v_head_stride
    if not HAS_WINDOW:
        acc, row_max, row_sum = attend_tiles(
            q, acc, row_max, row_sum, context_len + query, seq_len, first_tile, masked_tile,
            block_table_ptr, k_ptr, v_ptr, k_block_stride, k_offset_stride, v_block_stride, v_offset_stride,
            logit_scale, soft_cap_log2, sliding_window,
            False, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    acc, row_max, row_sum = attend_tiles(
        q, acc, row_max, row_sum, context_len + query, seq_len, masked_tile, end_tile,
        block_table_ptr, k_ptr, v_ptr, k_block_stride, k_offset_stride, v_block_stride, v_offset_stride,
        logit_scale, soft_cap_log2, sliding_window,
        True, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_row_ptr = out_ptr + token[:, None] * out_token_stride + head[:, None] * out_head_stride
    tl.store(out_row_ptr + column, result.to(out_ptr.dtype.element_ty), mask=mask)
