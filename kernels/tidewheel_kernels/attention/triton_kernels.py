"""Launchers of attention, and the kernel for prompts: a program per tile of queries and KV head.

Decodes go to `triton_decode`, unless results must be invariant. With TMA, the tensor memory accelerator copies keys
and values.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakIdKeyDictionary
from triton.tools.tensor_descriptor import TensorDescriptor

from tidewheel_kernels.attention.call_shape import CallShape, call_shape
from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.attention.triton_decode import launch_decode
from tidewheel_kernels.attention.triton_tiles import (
    attend_boxes,
    attend_tiles,
    empty_softmax,
    first_logits,
    for_cache,
    store_rows,
)
from tidewheel_kernels.launch_config import (
    AttentionConfig,
    architecture,
    declared_blocks,
    decode_config,
    prefill_config,
)
from tidewheel_kernels.triton_launch import MAX_LAUNCHES, KernelLauncher

_VARYING = ["first_seq", "num_seqs"]  # with every batch: specialised, they would compile again
_SMALL_TENSORS = ["block_tables_ptr", "cu_seqlens_ptr", "seq_lens_ptr", "scales_ptr"]
# Making one takes microseconds.
_descriptors = WeakIdKeyDictionary()


@triton.jit
def _sequence_of_tile(cu_seqlens_ptr, first_row, tile, num_seqs, BLOCK_Q: tl.constexpr):
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
    # Programs with most keys start first.
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
    first_position,
    seq_len,
    sliding_window,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):
    """Return tiles (first, full, masked, end): in [full, masked) all queries see all keys.

    With ONE_LOOP, masked equals first.
    """
    end = tl.cdiv(tl.minimum(first_position + BLOCK_Q, seq_len), BLOCK_N)
    masked = (first_position + 1) // BLOCK_N
    first = 0
    full = 0
    if HAS_WINDOW:
        first = tl.maximum(first_position - sliding_window + 1, 0) // BLOCK_N
        full = tl.minimum(tl.cdiv(tl.maximum(first_position + BLOCK_Q - sliding_window, 0), BLOCK_N), masked)
    if ONE_LOOP:
        masked = first
    return first, full, masked, end


@triton.jit
def _attend(
    q,  # [BLOCK_M, BLOCK_D]
    position,  # [BLOCK_M]
    first_position,
    seq_len,
    block_table_ptr,
    k_cache,
    v_cache,
    kv_head,
    logit_scale,
    soft_cap_log2,
    sliding_window,
    k_block_stride,
    k_offset_stride,
    k_head_stride,
    v_block_stride,
    v_offset_stride,
    v_head_stride,
    TMA: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tiles = _key_tiles(first_position, seq_len, sliding_window, BLOCK_Q, BLOCK_N, HAS_WINDOW, ONE_LOOP)
    acc, row_max, row_sum = empty_softmax(BLOCK_M, BLOCK_D)
    # Parts: start of the window, tiles without a mask, diagonal. Their code may be contracted differently, and the
    # part of a tile depends on where the chunk begins.
    FIRST_PART: tl.constexpr = 2 if ONE_LOOP else (0 if HAS_WINDOW else 1)
    if TMA:
        last_tile = tiles[3] - 1
        if ONE_LOOP:
            last_tile = tl.maximum(last_tile, 0)  # padding has no key
        logits = first_logits(q, tiles[0], block_table_ptr, k_cache, kv_head, BLOCK_SIZE, BLOCK_N, BLOCK_D)
        for part in tl.static_range(FIRST_PART, 3):
            logits, acc, row_max, row_sum = attend_boxes(
                q, logits, acc, row_max, row_sum, position, seq_len, tiles[part], tiles[part + 1], last_tile,
                block_table_ptr, k_cache, v_cache, kv_head, logit_scale, soft_cap_log2, sliding_window,
                part != 1, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    else:
        k_ptr = k_cache + kv_head * k_head_stride
        v_ptr = v_cache + kv_head * v_head_stride
        for part in tl.static_range(FIRST_PART, 3):
            acc, row_max, row_sum = attend_tiles(
                q, acc, row_max, row_sum, position, seq_len, tiles[part], tiles[part + 1],
                block_table_ptr, k_ptr, v_ptr, k_block_stride, k_offset_stride, v_block_stride, v_offset_stride,
                logit_scale, soft_cap_log2, sliding_window,
                part != 1, HAS_SOFT_CAP, HAS_WINDOW, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    return acc, row_sum


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SMALL_TENSORS)
def prefill_attention_kernel(
    q_ptr,  # [num_tokens, num_q_heads, head_dim]
    out_ptr,  # [num_tokens, num_q_heads, head_dim]
    block_tables_ptr,  # [first_seq + num_seqs, max_blocks]
    cu_seqlens_ptr,  # [first_seq + num_seqs + 1]
    seq_lens_ptr,  # [first_seq + num_seqs]
    scales_ptr,  # [2, num_kv_heads], for 8 bits
    k_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim], or its descriptor
    v_cache,  # like k_cache
    first_seq,
    num_seqs,
    TMA: tl.constexpr,
    ONE_LOOP: tl.constexpr,
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
    # grid: [num_rows // BLOCK_Q + num_seqs, num_kv_heads], from sequence first_seq on
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    seq, start, query_len, first_query = _query_tile(cu_seqlens_ptr, first_seq, num_seqs, BLOCK_Q)
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    query = first_query + row // GROUP
    head = (kv_head * GROUP + row % GROUP)[:, None]
    mask = ((row < BLOCK_Q * GROUP) & (query < query_len))[:, None] & (column < HEAD_DIM)
    token = (start + query).to(tl.int64)[:, None]
    q = tl.load(q_ptr + token * q_token_stride + head * q_head_stride + column, mask=mask, other=0.0)
    context_len = seq_len - query_len
    stored: tl.constexpr = k_cache.dtype if TMA else k_cache.dtype.element_ty
    q, k_scale, v_scale = for_cache(q, scales_ptr, kv_head, tl.num_programs(1), stored)
    acc, row_sum = _attend(
        q, context_len + query, context_len + first_query, seq_len,
        block_tables_ptr + seq.to(tl.int64) * block_table_stride, k_cache, v_cache, kv_head,
        logit_scale * k_scale, soft_cap_log2, sliding_window,
        k_block_stride, k_offset_stride, k_head_stride, v_block_stride, v_offset_stride, v_head_stride,
        TMA, ONE_LOOP, HAS_SOFT_CAP, HAS_WINDOW, HEAD_DIM, BLOCK_SIZE, BLOCK_Q, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    store_rows(out_ptr + token * out_token_stride + head * out_head_stride + column, acc, row_sum, v_scale, mask)


@lru_cache(MAX_LAUNCHES)
def _prefill(shape: CallShape, config: AttentionConfig, one_loop: bool) -> KernelLauncher:
    constants = {"TMA": config.tma, "ONE_LOOP": one_loop, **shape.constants(config)}
    return KernelLauncher(
        prefill_attention_kernel, constants, num_warps=config.num_warps, num_stages=config.num_stages
    )


def launch_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    shape: CallShape,
    config: AttentionConfig,
    scales: torch.Tensor | None,
    *,
    one_loop: bool = False,  # also for decodes
) -> None:
    first = 0 if one_loop else meta.num_decodes
    num_seqs = meta.num_seqs - first
    grid = ((q.shape[0] - first) // (config.block_m // shape.group) + num_seqs, shape.num_kv_heads, 1)
    launch = _prefill(shape, config, one_loop)
    tensors = (q, out, meta.block_tables, meta.cu_seqlens_q, meta.seq_lens, out if scales is None else scales)
    if config.tma:
        box = (1, config.block_n, 1, config.block_d)
        launch(grid, tensors, box_descriptor(k_cache, box), box_descriptor(v_cache, box), first, num_seqs)
    else:
        launch(grid, (*tensors, k_cache, v_cache), first, num_seqs)


def box_descriptor(tensor: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """Return a TMA descriptor of boxes, cached while the tensor lives and does not move. Loads beyond a block give 0.

    Raise `AssertionError` unless address and strides are multiples of 16 bytes and the last dimension is contiguous.
    """
    boxes: dict[tuple[int, ...], TensorDescriptor] = _descriptors.setdefault(tensor, {})
    descriptor = boxes.get(box)
    if descriptor is None or descriptor.base.data_ptr() != tensor.data_ptr():
        shape, strides = list(tensor.shape), list(tensor.stride())
        shape[0] = declared_blocks(shape, strides, tensor.element_size())
        descriptor = boxes[box] = TensorDescriptor(_alias(tensor), shape, strides, list(box))
    return descriptor


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    scales: torch.Tensor | None,
) -> None:
    shape = call_shape(q, k_cache, v_cache, meta, out, scale, sliding_window, soft_cap)
    tile, fp8 = (shape.head_dim, shape.group, shape.block_size, q.element_size()), scales is not None
    if meta.num_decodes:
        launch_decode(q, k_cache, v_cache, meta, out, shape, decode_config(*tile, fp8=fp8), scales)
    if meta.num_seqs > meta.num_decodes:
        config = prefill_config(*tile, architecture(q.device), fp8=fp8)
        launch_prefill(q, k_cache, v_cache, meta, out, shape, config, scales)


def invariant_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    scales: torch.Tensor | None,
) -> None:
    """Compute `paged_attention`, for a query bitwise the same in any batch."""
    shape = call_shape(q, k_cache, v_cache, meta, out, scale, sliding_window, soft_cap)
    tile, fp8 = (shape.head_dim, shape.group, shape.block_size, q.element_size()), scales is not None
    config = prefill_config(*tile, architecture(q.device), fp8=fp8)
    launch_prefill(q, k_cache, v_cache, meta, out, shape, config, scales, one_loop=True)
