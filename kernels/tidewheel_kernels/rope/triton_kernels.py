from functools import lru_cache

import torch
import triton
import triton.language as tl

from tidewheel_kernels.kv_cache.triton_kernels import scaled, slot_ptr
from tidewheel_kernels.launch_config import LaunchConfig, cdiv, next_power_of_2, rope_config, starts_early
from tidewheel_kernels.triton_early import wait_for_inputs
from tidewheel_kernels.triton_launch import MAX_LAUNCHES, KernelLauncher


@triton.jit
def _rotated(
    row_ptr,  # [BLOCK_HEADS, 1] start of each head
    weight_ptr,  # [head_dim]
    cos_ptr,  # [half]; sin follows
    head_mask,  # [BLOCK_HEADS, 1]
    eps,
    half: tl.constexpr,
    head_dim: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    column = tl.arange(0, BLOCK_HALF)[None, :]
    mask = head_mask & (column < half)
    first = tl.load(row_ptr + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row_ptr + half + column, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + column, mask=column < half, other=0.0)
    sin = tl.load(cos_ptr + half + column, mask=column < half, other=0.0)
    rest_column = 2 * half + tl.arange(0, BLOCK_REST)[None, :]
    rest = tl.zeros_like(head_mask * rest_column).to(tl.float32)
    if 2 * half < head_dim:
        rest = tl.load(row_ptr + rest_column, mask=head_mask & (rest_column < head_dim), other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(rest * rest, axis=1)
        scale = (1.0 / tl.sqrt(squares / head_dim + eps))[:, None]
        first *= scale * tl.load(weight_ptr + column, mask=column < half, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight_ptr + half + column, mask=column < half, other=0.0).to(tl.float32)
        if 2 * half < head_dim:
            rest *= scale * tl.load(weight_ptr + rest_column, mask=rest_column < head_dim, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin, rest


@triton.jit
def _store_head(
    row_ptr,  # [BLOCK_HEADS, 1]
    first,  # [BLOCK_HEADS, BLOCK_HALF]
    second,  # [BLOCK_HEADS, BLOCK_HALF]
    rest,  # [BLOCK_HEADS, BLOCK_REST]
    head_mask,  # [BLOCK_HEADS, 1]
    half: tl.constexpr,
    head_dim: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    dtype = row_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK_HALF)[None, :]
    mask = head_mask & (column < half)
    tl.store(row_ptr + column, first.to(dtype), mask=mask)
    tl.store(row_ptr + half + column, second.to(dtype), mask=mask)
    if 2 * half < head_dim:
        rest_column = 2 * half + tl.arange(0, BLOCK_REST)[None, :]
        tl.store(row_ptr + rest_column, rest.to(dtype), mask=head_mask & (rest_column < head_dim))


@triton.jit
def _rotate_and_cache(
    k_row_ptr,  # [BLOCK_HEADS, 1] start of each head
    k_slot_ptr,  # like k_row_ptr
    v_row_ptr,
    v_slot_ptr,
    has_slot,
    k_scale_ptr,  # like k_row_ptr, for 8 bits
    v_scale_ptr,
    weight_ptr,
    cos_ptr,
    head_mask,  # [BLOCK_HEADS, 1]
    eps,
    half: tl.constexpr,
    head_dim: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Values first, so that all loads are in flight at once.
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = head_mask & (column < head_dim)
    v = tl.load(v_row_ptr + column, mask=mask, other=0.0)
    first, second, rest = _rotated(
        k_row_ptr, weight_ptr, cos_ptr, head_mask, eps, half, head_dim, HAS_NORM, BLOCK_HALF, BLOCK_REST
    )
    _store_head(k_row_ptr, first, second, rest, head_mask, half, head_dim, BLOCK_HALF, BLOCK_REST)
    if k_slot_ptr.dtype.element_ty == tl.float8e4nv:
        # Cached values are rounded to the row's dtype first, as in the reference.
        dtype = k_row_ptr.dtype.element_ty
        scale = tl.load(k_scale_ptr, mask=head_mask, other=1.0)
        first = scaled(first.to(dtype), scale)
        second = scaled(second.to(dtype), scale)
        rest = scaled(rest.to(dtype), scale)
        v = scaled(v, tl.load(v_scale_ptr, mask=head_mask, other=1.0))
    if has_slot:
        _store_head(k_slot_ptr, first, second, rest, head_mask, half, head_dim, BLOCK_HALF, BLOCK_REST)
        tl.store(v_slot_ptr + column, v.to(v_slot_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr", "scales_ptr"])
def rope_and_cache_kernel(
    q_ptr,  # [num_tokens, num_q_heads, head_dim]
    k_ptr,  # [num_tokens, num_kv_heads, head_dim]
    v_ptr,  # like k_ptr
    cos_sin_ptr,  # [max_position, 2 * half]
    positions_ptr,  # [num_tokens]
    slot_mapping_ptr,  # [num_tokens]
    k_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache_ptr,  # like k_cache_ptr
    q_weight_ptr,  # [head_dim]
    k_weight_ptr,  # [head_dim]
    scales_ptr,  # [2, num_kv_heads], for 8 bits
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    cos_sin_stride,
    k_cache_block_stride,
    k_cache_offset_stride,
    k_cache_head_stride,
    v_cache_block_stride,
    v_cache_offset_stride,
    v_cache_head_stride,
    num_q_heads,
    num_kv_heads,
    block_size,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: [num_tokens, cdiv(num_q_heads, BLOCK_HEADS) + cdiv(num_kv_heads, BLOCK_HEADS)]
    token, tile, num_q_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.cdiv(num_q_heads, BLOCK_HEADS)
    wait_for_inputs(STARTS_EARLY)
    cos_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride
    if tile < num_q_tiles:
        head = (tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        row_ptr = q_ptr + token * q_token_stride + head * q_head_stride
        first, second, rest = _rotated(
            row_ptr, q_weight_ptr, cos_ptr, head < num_q_heads, eps, half, head_dim, HAS_NORM, BLOCK_HALF, BLOCK_REST
        )
        _store_head(row_ptr, first, second, rest, head < num_q_heads, half, head_dim, BLOCK_HALF, BLOCK_REST)
    else:
        head = ((tile - num_q_tiles) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        k_slot_ptr = slot_ptr(k_cache_ptr, slot, block_size, k_cache_block_stride, k_cache_offset_stride)
        v_slot_ptr = slot_ptr(v_cache_ptr, slot, block_size, v_cache_block_stride, v_cache_offset_stride)
        _rotate_and_cache(
            k_ptr + token * k_token_stride + head * k_head_stride, k_slot_ptr + head * k_cache_head_stride,
            v_ptr + token * v_token_stride + head * v_head_stride, v_slot_ptr + head * v_cache_head_stride,
            slot >= 0, scales_ptr + head, scales_ptr + num_kv_heads + head, k_weight_ptr, cos_ptr,
            head < num_kv_heads, eps, half, head_dim, HAS_NORM, BLOCK_HALF, BLOCK_REST, BLOCK_D,
        )  # fmt: skip


@lru_cache(MAX_LAUNCHES)
def _launch(
    config: LaunchConfig,
    q_stride: tuple[int, ...],
    k_stride: tuple[int, ...],
    v_stride: tuple[int, ...],
    cos_sin_stride: int,
    k_cache_stride: tuple[int, ...],
    v_cache_stride: tuple[int, ...],
    num_heads: tuple[int, int],
    block_size: int,
    head_dim: int,
    half: int,
    eps: float,
    has_norm: bool,
    early: bool,
) -> KernelLauncher:
    constants = {
        "eps": eps,
        "q_token_stride": q_stride[0],
        "q_head_stride": q_stride[1],
        "k_token_stride": k_stride[0],
        "k_head_stride": k_stride[1],
        "v_token_stride": v_stride[0],
        "v_head_stride": v_stride[1],
        "cos_sin_stride": cos_sin_stride,
        "k_cache_block_stride": k_cache_stride[0],
        "k_cache_offset_stride": k_cache_stride[1],
        "k_cache_head_stride": k_cache_stride[2],
        "v_cache_block_stride": v_cache_stride[0],
        "v_cache_offset_stride": v_cache_stride[1],
        "v_cache_head_stride": v_cache_stride[2],
        "num_q_heads": num_heads[0],
        "num_kv_heads": num_heads[1],
        "block_size": block_size,
        "head_dim": head_dim,
        "half": half,
        "HAS_NORM": has_norm,
        "STARTS_EARLY": early,
        "BLOCK_HEADS": config.block,
        "BLOCK_HALF": next_power_of_2(half),
        "BLOCK_REST": next_power_of_2(max(head_dim - 2 * half, 1)),
        "BLOCK_D": next_power_of_2(head_dim),
    }
    return KernelLauncher(rope_and_cache_kernel, constants, num_warps=config.num_warps, launch_pdl=early)


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    eps: float,
    scales: torch.Tensor | None,
) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    if num_tokens == 0:
        return
    num_kv_heads, half = k.shape[1], cos_sin_cache.shape[1] // 2
    config = rope_config(num_q_heads)
    weights = (cos_sin_cache, cos_sin_cache)
    scales = cos_sin_cache if scales is None else scales
    if has_norm := q_norm_weight is not None and k_norm_weight is not None:
        weights = (q_norm_weight, k_norm_weight)
    launch = _launch(
        config, q.stride(), k.stride(), v.stride(), cos_sin_cache.stride(0), k_cache.stride(), v_cache.stride(),
        (num_q_heads, num_kv_heads), k_cache.shape[1], head_dim, half, eps, has_norm, starts_early(q.device),
    )  # fmt: skip
    launch(
        (num_tokens, cdiv(num_q_heads, config.block) + cdiv(num_kv_heads, config.block), 1),
        (q, k, v, cos_sin_cache, positions, slot_mapping, k_cache, v_cache, *weights, scales),
    )
