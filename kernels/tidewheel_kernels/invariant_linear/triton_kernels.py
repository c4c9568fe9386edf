"""Matrix product that cuts the inner dimension into fixed splits and adds their sums in order.

For many rows, a program computes all splits of a tile; for few rows one, and a second kernel adds them, with the same
bits.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import LinearConfig, cdiv, elementwise_config, linear_config
from tidewheel_kernels.triton_launch import MAX_LAUNCHES, KernelLauncher

MOST_SPLIT_TILES = 64  # more fill half of a large device


@triton.jit
def _product_of_split(
    x_row_ptr,  # [BLOCK_M]
    weight_row_ptr,  # [BLOCK_N]
    is_row,  # [BLOCK_M]
    is_column,  # [BLOCK_N]
    split,
    in_features,
    SPLIT_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    first = split * SPLIT_LEN
    for begin in range(first, tl.minimum(first + SPLIT_LEN, in_features), BLOCK_K):
        feature = begin + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_row_ptr[:, None] + feature, mask=is_row[:, None] & (feature < in_features), other=0.0)
        weight_mask = is_column[:, None] & (feature < in_features)
        weight = tl.load(weight_row_ptr[:, None] + feature, mask=weight_mask, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def invariant_linear_kernel(
    x_ptr,  # [num_rows, in_features]
    weight_ptr,  # [out_features, in_features]
    bias_ptr,  # [out_features], with HAS_BIAS
    out_ptr,  # [num_rows, out_features]
    partial_ptr,  # [NUM_SPLITS, num_rows, out_features] float32
    num_rows,
    x_stride,
    out_features,
    in_features,
    HAS_BIAS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: [cdiv(num_rows, BLOCK_M) * cdiv(out_features, BLOCK_N), 1 or NUM_SPLITS]; programs of the same weights are
    # neighbours.
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    row = tl.program_id(0) % num_row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) // num_row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < out_features
    x_row_ptr = x_ptr + row.to(tl.int64) * x_stride
    weight_row_ptr = weight_ptr + column.to(tl.int64) * in_features
    place = row.to(tl.int64)[:, None] * out_features + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    if NUM_SPLITS > 1:
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        split = tl.program_id(1)
        is_alone = tl.num_programs(1) == 1
        end_split = tl.where(is_alone, NUM_SPLITS, split + 1)
        for i in range(split, end_split):
            total += _product_of_split(
                x_row_ptr, weight_row_ptr, is_row, is_column, i, in_features, SPLIT_LEN, BLOCK_M, BLOCK_N, BLOCK_K
            )
        if not is_alone:
            tl.store(partial_ptr + split.to(tl.int64) * num_rows * out_features + place, total, mask=mask)
            return
    else:
        total = _product_of_split(
            x_row_ptr, weight_row_ptr, is_row, is_column, 0, in_features, SPLIT_LEN, BLOCK_M, BLOCK_N, BLOCK_K
        )
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_splits_kernel(
    partial_ptr,  # [NUM_SPLITS, num_rows, out_features]
    bias_ptr,  # [out_features], with HAS_BIAS
    out_ptr,  # [num_rows, out_features]
    num_rows,
    out_features,
    HAS_BIAS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: [num_rows, cdiv(out_features, BLOCK)]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < out_features
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(partial_ptr + (split * num_rows + row) * out_features + column, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_features + column, total.to(out_ptr.dtype.element_ty), mask=mask)


@lru_cache(MAX_LAUNCHES)
def _product(
    config: LinearConfig, x_stride: int, out_features: int, in_features: int, has_bias: bool
) -> KernelLauncher:
    constants = {
        "x_stride": x_stride,
        "out_features": out_features,
        "in_features": in_features,
        "HAS_BIAS": has_bias,
        "NUM_SPLITS": config.num_splits,
        "SPLIT_LEN": config.split_len,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
    return KernelLauncher(
        invariant_linear_kernel, constants, num_warps=config.num_warps, num_stages=config.num_stages
    )


@lru_cache(MAX_LAUNCHES)
def _sum(num_splits: int, out_features: int, has_bias: bool) -> KernelLauncher:
    block, num_warps, _ = elementwise_config(out_features)
    constants = {"out_features": out_features, "HAS_BIAS": has_bias, "NUM_SPLITS": num_splits, "BLOCK": block}
    return KernelLauncher(add_splits_kernel, constants, num_warps=num_warps)


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    out = x.new_empty((num_rows, out_features))
    if num_rows == 0:
        return out
    config = linear_config(out_features, in_features, x.element_size())
    num_tiles = cdiv(num_rows, config.block_m) * cdiv(out_features, config.block_n)
    # Unused but float32: another type would compile another kernel.
    num_partials = config.num_splits if config.num_splits > 1 and num_tiles <= MOST_SPLIT_TILES else 0
    partial = torch.empty((num_partials, num_rows, out_features), dtype=torch.float32, device=x.device)
    has_bias, biases = bias is not None, weight if bias is None else bias
    product = _product(config, x.stride(0), out_features, in_features, has_bias)
    product((num_tiles, max(num_partials, 1), 1), (x, weight, biases, out, partial), num_rows)
    if num_partials:
        add_splits(partial, bias, out)
    return out


def add_splits(partial: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write the sum of `partial` [splits, num_rows, out_features] float32 and `bias` to `out`."""
    num_splits, num_rows, out_features = partial.shape
    add = _sum(num_splits, out_features, bias is not None)
    block = elementwise_config(out_features).block
    add((num_rows, cdiv(out_features, block), 1), (partial, out if bias is None else bias, out), num_rows)
