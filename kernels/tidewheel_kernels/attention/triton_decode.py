"""Attention of long decodes, split among programs; a second kernel merges their results (Flash-decoding, Dao et al.
2023).
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from tidewheel_kernels.attention.call_shape import CallShape
from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.attention.triton_splits import FIELDS, split_plan, visible_tiles
from tidewheel_kernels.attention.triton_tiles import attend_tiles, empty_softmax, for_cache, store_rows
from tidewheel_kernels.launch_config import AttentionConfig, decode_splits, multiprocessors, next_power_of_2
from tidewheel_kernels.triton_launch import MAX_LAUNCHES, KernelLauncher

_INDEX_TENSORS = ["plan_ptr", "block_tables_ptr", "seq_lens_ptr"]
_SMALL_TENSORS = [*_INDEX_TENSORS, "scales_ptr"]
# Splits of one sequence with eight KV heads.
MERGE_BLOCK_SPLITS = 64


@triton.jit
def _keys_of_program(
    plan_ptr,
    seq_lens_ptr,
    sliding_window,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    seq = tl.program_id(1)
    num_splits = 1
    if SPLIT:
        row_ptr = plan_ptr + seq * FIELDS
        seq = tl.load(row_ptr)
        begin = tl.load(row_ptr + 1)
        end = tl.load(row_ptr + 2)
        num_splits = tl.load(row_ptr + 3)
    seq_len = tl.load(seq_lens_ptr + seq)
    if not SPLIT:
        begin, end = visible_tiles(seq_len, sliding_window, BLOCK_N, HAS_WINDOW)
    return seq.to(tl.int64), seq_len, begin, end, num_splits


@triton.jit(do_not_specialize=["num_partials"], do_not_specialize_on_alignment=_SMALL_TENSORS)
def decode_attention_kernel(
    q_ptr,  # [num_seqs, num_q_heads, head_dim]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    v_cache_ptr,  # like k_cache_ptr
    out_ptr,  # [num_seqs, num_q_heads, head_dim]
    partial_ptr,  # float32 [num_partials, num_q_heads, head_dim], then [num_partials, num_q_heads]
    plan_ptr,  # [programs, FIELDS], with SPLIT
    block_tables_ptr,  # [num_seqs, max_blocks]
    seq_lens_ptr,  # [num_seqs]
    scales_ptr,  # [2, num_kv_heads], for 8 bits
    num_partials,
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
    kv_head = tl.program_id(0)  # grid: [num_kv_heads, num_seqs], or all programs of the plan
    seq, seq_len, begin_tile, end_tile, num_splits = _keys_of_program(
        plan_ptr, seq_lens_ptr, sliding_window, SPLIT, BLOCK_N, HAS_WINDOW
    )
    if num_splits == 0:
        return
    row, column, num_heads = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :], tl.num_programs(0) * GROUP
    head, mask = kv_head * GROUP + row, (row < GROUP)[:, None] & (column < HEAD_DIM)
    q = tl.load(q_ptr + seq * q_token_stride + head[:, None] * q_head_stride + column, mask=mask, other=0.0)
    q, k_scale, v_scale = for_cache(q, scales_ptr, kv_head, tl.num_programs(0), k_cache_ptr.dtype.element_ty)
    acc, row_max, row_sum = empty_softmax(BLOCK_M, BLOCK_D)
    acc, row_max, row_sum = attend_tiles(
        q, acc, row_max, row_sum, tl.zeros([BLOCK_M], dtype=tl.int32) + (seq_len - 1), seq_len, begin_tile, end_tile,
        block_tables_ptr + seq * block_table_stride,
        k_cache_ptr + kv_head * k_head_stride, v_cache_ptr + kv_head * v_head_stride,
        k_block_stride, k_offset_stride, v_block_stride, v_offset_stride, logit_scale * k_scale, soft_cap_log2,
        sliding_window, True, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if SPLIT and num_splits > 1:
        place = tl.program_id(1) * num_heads + head
        tl.store(partial_ptr + num_partials * num_heads * HEAD_DIM + place, row_max + tl.log2(row_sum), row < GROUP)
        store_rows(partial_ptr + place[:, None] * HEAD_DIM + column, acc, row_sum, v_scale, mask)
    else:
        row_ptr = out_ptr + seq * out_token_stride + head[:, None] * out_head_stride + column
        store_rows(row_ptr, acc, row_sum, v_scale, mask)


@triton.jit(do_not_specialize=["num_partials"], do_not_specialize_on_alignment=_INDEX_TENSORS)
def merge_splits_kernel(
    partial_ptr,  # as in `decode_attention_kernel`
    out_ptr,  # [num_seqs, num_q_heads, head_dim]
    plan_ptr,  # [num_partials // 2, FIELDS]
    num_partials,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: [num_q_heads, num_partials // 2]
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    row_ptr = plan_ptr + tl.program_id(1) * FIELDS
    num_splits = tl.load(row_ptr + 2)
    if num_splits < 2:
        return
    seq = tl.load(row_ptr).to(tl.int64)
    first = tl.load(row_ptr + 1)
    log2_sum_ptr = partial_ptr + num_partials * num_heads * HEAD_DIM

    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    total = 0.0
    largest = float("-inf")
    for chunk in range(0, num_splits, BLOCK_SPLITS):
        split = chunk + tl.arange(0, BLOCK_SPLITS)
        place = (first + split) * num_heads + head
        # Both loads come first: neither waits for the other.
        log2_sum = tl.load(log2_sum_ptr + place, mask=split < num_splits, other=float("-inf"))
        partial = tl.load(
            partial_ptr + place[:, None] * HEAD_DIM + column[None, :],
            mask=(split < num_splits)[:, None] & (column < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(log2_sum, axis=0))
        weight = tl.exp2(log2_sum - new_largest)
        decay = tl.exp2(largest - new_largest)
        acc = acc * decay + tl.sum(partial * weight[:, None], axis=0)
        total = total * decay + tl.sum(weight, axis=0)
        largest = new_largest
    result = acc / total
    out_row_ptr = out_ptr + seq * out_token_stride + head * out_head_stride
    tl.store(out_row_ptr + column, result.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


@lru_cache(MAX_LAUNCHES)
def _decode(shape: CallShape, config: AttentionConfig, is_split: bool) -> KernelLauncher:
    constants = {"SPLIT": is_split, **shape.constants(config)}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    return KernelLauncher(decode_attention_kernel, constants, **options)


@lru_cache(MAX_LAUNCHES)
def _merge(shape: CallShape) -> KernelLauncher:
    constants = {
        "out_token_stride": shape.out_stride[0],
        "out_head_stride": shape.out_stride[1],
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SPLITS": MERGE_BLOCK_SPLITS,
        "BLOCK_D": next_power_of_2(shape.head_dim),
    }
    return KernelLauncher(merge_splits_kernel, constants, num_warps=4)


def launch_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    shape: CallShape,
    config: AttentionConfig,
    scales: torch.Tensor | None,
) -> None:
    num_seqs, num_kv_heads = meta.num_decodes, shape.num_kv_heads
    scales = out if scales is None else scales
    limits = decode_splits(num_seqs, num_kv_heads, meta.max_seq_len, multiprocessors(q.device))
    plan = split_plan(meta, limits, config.block_n, shape.sliding_window)
    if plan is None:
        tensors = (q, k_cache, v_cache, out, out, meta.seq_lens, meta.block_tables, meta.seq_lens, scales)
        _decode(shape, config, False)((num_kv_heads, num_seqs, 1), tensors, 0)
        return
    num_partials = 2 * limits.extra
    size = num_partials * shape.num_q_heads * (shape.head_dim + 1)
    partial = torch.empty(size, dtype=torch.float32, device=q.device)
    tensors = (q, k_cache, v_cache, out, partial, plan.programs, meta.block_tables, meta.seq_lens, scales)
    _decode(shape, config, True)((num_kv_heads, num_seqs + limits.extra, 1), tensors, num_partials)
    _merge(shape)((shape.num_q_heads, limits.extra, 1), (partial, out, plan.merges), num_partials)
