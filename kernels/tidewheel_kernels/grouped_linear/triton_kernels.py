"""Products of float rows with weights of 4 and 8 bits, which become floats in registers.

Weights are the left operand, which tensor cores take from registers. With few tiles, several programs share each, and
a second kernel adds their sums.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from tidewheel_kernels.grouped_linear.reference import GroupedWeights
from tidewheel_kernels.invariant_linear.triton_kernels import add_splits
from tidewheel_kernels.launch_config import LinearConfig, cdiv, grouped_config, next_power_of_2
from tidewheel_kernels.triton_launch import MAX_LAUNCHES, KernelLauncher


@triton.jit
def _load_codes(row_ptr, is_column, begin, row_bytes, BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return [BLOCK_N, BLOCK_K] codes in float32 of inputs from `begin` on."""
    byte = begin * BITS // 8 + tl.arange(0, BLOCK_K * BITS // 8)[None, :]
    codes = tl.load(row_ptr[:, None] + byte, mask=is_column[:, None] & (byte < row_bytes), other=0)
    if BITS == 4:
        codes = tl.interleave(codes & 15, codes >> 4)
    return codes.to(tl.float32)


@triton.jit
def _load_factors(row_ptr, is_column, begin, num_groups, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return [BLOCK_N, groups, 1] scales or minimums in float32 from input `begin` on."""
    GROUPS: tl.constexpr = max(BLOCK_K // GROUP, 1)
    group = begin // GROUP + tl.arange(0, GROUPS)[None, :]
    factors = tl.load(row_ptr[:, None] + group, mask=is_column[:, None] & (group < num_groups), other=0.0)
    return factors.to(tl.float32)[:, :, None]


@triton.jit(do_not_specialize=["num_rows"])
def grouped_linear_kernel(
    x_ptr,  # [num_rows, in_features]
    codes_ptr,  # [out_features, row_bytes]
    scales_ptr,  # [out_features, num_groups]
    minimums_ptr,  # [out_features, num_groups], with HAS_MINIMUMS
    bias_ptr,  # [out_features], with HAS_BIAS
    out_ptr,  # [num_rows, out_features]
    partial_ptr,  # [splits, num_rows, out_features] float32, with IS_SPLIT
    num_rows,
    x_stride,
    out_features,
    in_features,
    row_bytes,
    num_groups,
    split_len,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: [cdiv(num_rows, BLOCK_M) * cdiv(out_features, BLOCK_N), splits]; programs of the same weights are
    # neighbours.
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    row = tl.program_id(0) % num_row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) // num_row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < out_features
    x_row_ptr = x_ptr + row.to(tl.int64) * x_stride
    codes_row_ptr = codes_ptr + column.to(tl.int64) * row_bytes
    scales_row_ptr = scales_ptr + column.to(tl.int64) * num_groups
    minimums_row_ptr = minimums_ptr + column.to(tl.int64) * num_groups
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first = tl.program_id(1) * split_len
    for begin in range(first, tl.minimum(first + split_len, in_features), BLOCK_K):
        feature = begin + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_row_ptr[:, None] + feature, mask=is_row[:, None] & (feature < in_features), other=0.0)
        codes = _load_codes(codes_row_ptr, is_column, begin, row_bytes, BITS, BLOCK_K)
        groups = tl.reshape(codes, [BLOCK_N, max(BLOCK_K // GROUP, 1), min(BLOCK_K, GROUP)])
        scales = _load_factors(scales_row_ptr, is_column, begin, num_groups, GROUP, BLOCK_K)
        if HAS_MINIMUMS:
            weights = groups * scales + _load_factors(minimums_row_ptr, is_column, begin, num_groups, GROUP, BLOCK_K)
        else:
            ZERO: tl.constexpr = 0 if codes_ptr.dtype.element_ty == tl.int8 else 1 << BITS - 1
            weights = (groups - ZERO) * scales
        weights = tl.reshape(weights, [BLOCK_N, BLOCK_K]).to(x.dtype)
        total = tl.dot(weights, tl.trans(x), total, input_precision="ieee")
    place = row.to(tl.int64)[None, :] * out_features + column[:, None]
    mask = is_row[None, :] & is_column[:, None]
    if IS_SPLIT:
        tl.store(partial_ptr + tl.program_id(1).to(tl.int64) * num_rows * out_features + place, total, mask=mask)
    else:
        if HAS_BIAS:
            total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@lru_cache(MAX_LAUNCHES)
def _product(
    config: LinearConfig, x_stride: int, shape: tuple[int, int], bits: int, group_size: int, has: tuple[bool, bool]
) -> KernelLauncher:
    out_features, in_features = shape
    constants = {
        "x_stride": x_stride,
        "out_features": out_features,
        "in_features": in_features,
        "row_bytes": in_features * bits // 8,
        "num_groups": in_features // group_size,
        "split_len": config.split_len,
        "BITS": bits,
        "GROUP": next_power_of_2(group_size),  # of signed weights, one group is the row
        "HAS_MINIMUMS": has[0],
        "HAS_BIAS": has[1],
        "IS_SPLIT": config.num_splits > 1,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
    return KernelLauncher(grouped_linear_kernel, constants, num_warps=config.num_warps, num_stages=config.num_stages)


def grouped_linear(x: torch.Tensor, weights: GroupedWeights, bias: torch.Tensor | None) -> torch.Tensor:
    num_rows, shape = x.shape[0], (weights.out_features, weights.in_features)
    out = x.new_empty((num_rows, weights.out_features))
    if num_rows == 0:
        return out
    config = grouped_config(num_rows, *shape, x.element_size())
    num_tiles = cdiv(num_rows, config.block_m) * cdiv(weights.out_features, config.block_n)
    # Unused but float32: another type would compile another kernel.
    num_partials = config.num_splits if config.num_splits > 1 else 0
    partial = torch.empty((num_partials, *out.shape), dtype=torch.float32, device=x.device)
    codes, scales, minimums, bits = weights
    has = minimums is not None, bias is not None
    product = _product(config, x.stride(0), shape, bits, weights.group_size, has)
    others = scales if minimums is None else minimums, x if bias is None else bias
    product((num_tiles, config.num_splits, 1), (x, codes, scales, *others, out, partial), num_rows)
    if num_partials:
        add_splits(partial, bias, out)
    return out
