"""Attention with any number of queries: one program per tile of queries and KV head.

With TMA, the tensor memory accelerator of sm_90 and later copies a box of keys and values per tile to shared memory;
otherwise threads load them through pointers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from tidewheel_kernels.jit.attention_tile import attend_boxes, attend_tiles, first_logits

# Values that change with every batch must not cause recompilation while serving.
_VARYING = ["first_seq", "num_seqs"]
_INDEX_TENSORS = ["block_tables_ptr", "cu_seqlens_ptr", "seq_lens_ptr"]


@triton.jit
def _sequence_of_tile(cu_seqlens_ptr, first_row, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """Sequence that owns `tile`.

    Sequence i has the tiles from ``start_i // BLOCK_Q + i`` on. This suffices without a prefix sum of tile counts, so
    the host knows the grid from the number of rows.
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


@triton.jit
def _query_tile(cu_seqlens_ptr, first_seq, num_seqs, BLOCK_Q: tl.constexpr):
    """(seq, start, query_len, first_query) of this program; without a query if ``first_query >= query_len``."""
    # Later tiles of a sequence have more keys: the longest programs start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_row = tl.load(cu_seqlens_ptr + first_seq)
    nth = _sequence_of_tile(cu_seqlens_ptr + first_seq, first_row, tile, num_seqs, BLOCK_Q)
    seq = first_seq + nth
    start = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - start
    first_query = (tile - (start - first_row) // BLOCK_Q - nth) * BLOCK_Q
    return seq, start, query_len, first_query


@triton.jit
def _key_tiles(
    first_position, seq_len, sliding_window, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """(first, full, masked, end): all queries see all keys of tiles [full, masked), and some keys of the others.

    Queries are at positions ``first_position .. first_position + BLOCK_Q - 1``; those from seq_len on do not exist.
    """
    end = tl.cdiv(tl.minimum(first_position + BLOCK_Q, seq_len), BLOCK_N)
    masked = (first_position + 1) // BLOCK_N
    first = 0
    full = 0
    if HAS_WINDOW:
        first = tl.maximum(first_position - sliding_window + 1, 0) // BLOCK_N
        full = tl.minimum(tl.cdiv(tl.maximum(first_position + BLOCK_Q - sliding_window, 0), BLOCK_N), masked)
    return first, full, masked, end


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDEX_TENSORS)
def prefill_attention_kernel(
    q_ptr,  # [num_tokens, num_q_heads, head_dim]
    k_cache,  # pointer to [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]; with TMA its descriptor
    v_cache,  # like k_cache; boxes of [1, BLOCK_N, 1, BLOCK_D]
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
    TMA: tl.constexpr,
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
    kv_head = tl.program_id(1)
    seq, start, query_len, first_query = _query_tile(cu_seqlens_ptr, first_seq, num_seqs, BLOCK_Q)
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
    position = context_len + query
    first_tile, full_tile, masked_tile, end_tile = _key_tiles(
        context_len + first_query, seq_len, sliding_window, BLOCK_Q, BLOCK_N, HAS_WINDOW
    )
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    block_table_ptr = block_tables_ptr + seq.to(tl.int64) * block_table_stride
    if TMA:
        logits = first_logits(q, first_tile, block_table_ptr, k_cache, kv_head, BLOCK_SIZE, BLOCK_N, BLOCK_D)
        if HAS_WINDOW:
            logits, acc, row_max, row_sum = attend_boxes(
                q, logits, acc, row_max, row_sum, position, seq_len, first_tile, full_tile, end_tile - 1,
                block_table_ptr, k_cache, v_cache, kv_head, logit_scale, soft_cap_log2, sliding_window,
                True, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        logits, acc, row_max, row_sum = attend_boxes(
            q, logits, acc, row_max, row_sum, position, seq_len, full_tile, masked_tile, end_tile - 1,
            block_table_ptr, k_cache, v_cache, kv_head, logit_scale, soft_cap_log2, sliding_window,
            False, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        logits, acc, row_max, row_sum = attend_boxes(
            q, logits, acc, row_max, row_sum, position, seq_len, masked_tile, end_tile, end_tile - 1,
            block_table_ptr, k_cache, v_cache, kv_head, logit_scale, soft_cap_log2, sliding_window,
            True, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    else:
        k_ptr = k_cache + kv_head * k_head_stride
        v_ptr = v_cache + kv_head * v_head_stride
        if HAS_WINDOW:
            acc, row_max, row_sum = attend_tiles(
                q, acc, row_max, row_sum, position, seq_len, first_tile, full_tile,
                block_table_ptr, k_ptr, v_ptr, k_block_stride, k_offset_stride, v_block_stride, v_offset_stride,
                logit_scale, soft_cap_log2, sliding_window,
                True, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        acc, row_max, row_sum = attend_tiles(
            q, acc, row_max, row_sum, position, seq_len, full_tile, masked_tile,
            block_table_ptr, k_ptr, v_ptr, k_block_stride, k_offset_stride, v_block_stride, v_offset_stride,
            logit_scale, soft_cap_log2, sliding_window,
            False, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        acc, row_max, row_sum = attend_tiles(
            q, acc, row_max, row_sum, position, seq_len, masked_tile, end_tile,
            block_table_ptr, k_ptr, v_ptr, k_block_stride, k_offset_stride, v_block_stride, v_offset_stride,
            logit_scale, soft_cap_log2, sliding_window,
            True, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip

    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_row_ptr = out_ptr + token[:, None] * out_token_stride + head[:, None] * out_head_stride
    tl.store(out_row_ptr + column, result.to(out_ptr.dtype.element_ty), mask=mask)
