"""Programs share one query's keys, and a second kernel merges their results (Flash-decoding, Dao et al. 2023)."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from tidewheel_kernels.attention.call_shape import CallShape
from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.attention.triton_tiles import attend_tiles, empty_softmax, store_rows
from tidewheel_kernels.launch_config import AttentionConfig, multiprocessors, next_power_of_2, num_kv_splits
from tidewheel_kernels.triton_launch import MAX_LAUNCHES, Launch

_INDEX_TENSORS = ["block_tables_ptr", "seq_lens_ptr"]
# All splits of one sequence with eight KV heads.
MERGE_BLOCK_SPLITS = 64


@triton.jit
def _visible_tiles(seq_len, num_splits, sliding_window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return (first, end, per_split): visible tiles, shared out by actual length."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - sliding_window, 0) // BLOCK_N
    end = tl.cdiv(seq_len, BLOCK_N)
    return first, end, tl.cdiv(end - first, num_splits)


@triton.jit
def _keys_of_split(seq_len_ptr, sliding_window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return (seq_len, begin, end): length and tiles of this program."""
    seq_len = tl.load(seq_len_ptr)
    first, end, per_split = _visible_tiles(seq_len, tl.num_programs(2), sliding_window, BLOCK_N, HAS_WINDOW)
    begin = first + tl.program_id(2) * per_split
    return seq_len, begin, tl.minimum(begin + per_split, end)


@triton.jit(do_not_specialize_on_alignment=_INDEX_TENSORS)
def decode_attention_kernel(
    q_ptr,  # [num_seqs, num_q_heads, head_dim]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    v_cache_ptr,  # like k_cache_ptr
    out_ptr,  # [num_seqs, num_q_heads, head_dim], or float32 [num_seqs, num_q_heads, num_splits, head_dim]
    log2_sum_ptr,  # [num_seqs, num_q_heads, num_splits] float32, with SPLIT
    block_tables_ptr,  # [num_seqs, max_blocks]
    seq_lens_ptr,  # [num_seqs]
    num_q_heads,
    SPLIT: tl.constexpr,
    logit_scale,
    soft_cap_log2,
    sliding_window,
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
    # grid: [num_kv_heads, num_seqs, num_splits]
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    seq_len, begin_tile, end_tile = _keys_of_split(seq_lens_ptr + seq, sliding_window, BLOCK_N, HAS_WINDOW)
    if SPLIT and begin_tile >= end_tile:
        return
    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < GROUP)[:, None] & (column < HEAD_DIM)
    q = tl.load(q_ptr + seq * q_token_stride + head[:, None] * q_head_stride + column, mask=mask, other=0.0)
    acc, row_max, row_sum = empty_softmax(BLOCK_M, BLOCK_D)
    # Mask every tile: a second loop would refill the pipeline.
    acc, row_max, row_sum = attend_tiles(
        q, acc, row_max, row_sum, tl.zeros([BLOCK_M], dtype=tl.int32) + (seq_len - 1), seq_len, begin_tile, end_tile,
        block_tables_ptr + seq * block_table_stride,
        k_cache_ptr + kv_head * k_head_stride, v_cache_ptr + kv_head * v_head_stride,
        k_block_stride, k_offset_stride, v_block_stride, v_offset_stride, logit_scale, soft_cap_log2, sliding_window,
        True, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if SPLIT:
        place = (seq * num_q_heads + head) * tl.num_programs(2) + tl.program_id(2)
        tl.store(log2_sum_ptr + place, row_max + tl.log2(row_sum), mask=row < GROUP)
        row_ptr = out_ptr + place[:, None] * HEAD_DIM
    else:
        row_ptr = out_ptr + seq * out_token_stride + head[:, None] * out_head_stride
    store_rows(row_ptr + column, acc, row_sum, mask)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=_INDEX_TENSORS)
def merge_splits_kernel(
    partial_ptr,  # [num_seqs, num_q_heads, num_splits, head_dim] float32
    log2_sum_ptr,  # [num_seqs, num_q_heads, num_splits] float32
    out_ptr,  # [num_seqs, num_q_heads, head_dim]
    seq_lens_ptr,  # [num_seqs]
    num_splits,
    sliding_window,
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
    first_tile, num_tiles, tiles_per_split = _visible_tiles(seq_len, num_splits, sliding_window, BLOCK_N, HAS_WINDOW)
    # Splits without keys stored nothing.
    num_filled = tl.cdiv(num_tiles - first_tile, tl.maximum(tiles_per_split, 1))

    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    total = 0.0
    largest = float("-inf")
    for chunk in range(0, num_filled, BLOCK_SPLITS):
        split = chunk + tl.arange(0, BLOCK_SPLITS)
        # Neither load waits for the other.
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


@lru_cache(MAX_LAUNCHES)
def _decode(shape: CallShape, config: AttentionConfig, is_split: bool) -> Launch:
    constants = {"num_q_heads": shape.num_q_heads, "SPLIT": is_split, **shape.constants(config)}
    return Launch(decode_attention_kernel, constants, num_warps=config.num_warps, num_stages=config.num_stages)


@lru_cache(MAX_LAUNCHES)
def _merge(shape: CallShape, config: AttentionConfig) -> Launch:
    constants = {
        "sliding_window": shape.sliding_window,
        "out_token_stride": shape.out_stride[0],
        "out_head_stride": shape.out_stride[1],
        "HAS_WINDOW": shape.sliding_window > 0,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_N": config.block_n,
        "BLOCK_SPLITS": MERGE_BLOCK_SPLITS,
        "BLOCK_D": next_power_of_2(shape.head_dim),
    }
    return Launch(merge_splits_kernel, constants, num_warps=4)


def launch_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    shape: CallShape,
    config: AttentionConfig,
) -> None:
    num_seqs, num_q_heads, num_kv_heads = meta.num_decodes, shape.num_q_heads, shape.num_kv_heads
    num_splits = num_kv_splits(num_seqs, num_kv_heads, meta.max_seq_len, multiprocessors(q.device))
    partial, log2_sum = out, out
    if num_splits > 1:
        log2_sum = torch.empty((num_seqs, num_q_heads, num_splits), dtype=torch.float32, device=q.device)
        partial = torch.empty((*log2_sum.shape, q.shape[2]), dtype=torch.float32, device=q.device)
    tensors = (q, k_cache, v_cache, partial, log2_sum, meta.block_tables, meta.seq_lens)
    _decode(shape, config, num_splits > 1)((num_kv_heads, num_seqs, num_splits), tensors)
    if num_splits > 1:
        _merge(shape, config)((num_q_heads, num_seqs, 1), (partial, log2_sum, out, meta.seq_lens), num_splits)
