"""Rounding of rows to 8 bits, a program per row, in registers; torch multiplies (cuBLAS or CUTLASS).

`scale_product_kernel` reads each int32 sum once; torch's operators would read and write it four times.

On Hopper, sums leave the tensor cores for float32 registers every 128 products or so. With `fast_accumulation` they
stay, and 32 products round them towards zero by up to 2^-13: 1.6 % for 4,096 inputs, 5.5 % for 14,336.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from tidewheel_kernels.kv_cache.reference import FP8
from tidewheel_kernels.kv_cache.triton_kernels import LARGEST
from tidewheel_kernels.launch_config import LaunchConfig, cdiv, elementwise_config, row_config
from tidewheel_kernels.scaled_linear.reference import LEAST_SCALE
from tidewheel_kernels.switches import is_on
from tidewheel_kernels.triton_launch import MAX_LAUNCHES, KernelLauncher

LARGEST_INTEGER = tl.constexpr(127.0)
ROUNDER = tl.constexpr(1.5 * 2**23)  # float32 of this size has no bits below 1
ROW_MULTIPLE = 32  # torch._int_mm needs more than 16 rows, and cuBLASLt prefers aligned sizes


@triton.jit
def quantize_rows_kernel(
    x_ptr,  # [num_rows, width]
    out_ptr,  # [num_rows, width]
    scales_ptr,  # [num_rows]
    x_stride,
    width,
    least_scale,
    BLOCK: tl.constexpr,
):
    # grid: [num_rows]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    IS_INTEGER: tl.constexpr = out_ptr.dtype.element_ty == tl.int8
    # Compared by their bits, NaN and infinity are the largest.
    largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(largest, LARGEST_INTEGER if IS_INTEGER else LARGEST), least_scale)
    narrow = tl.div_rn(x, scale)
    if IS_INTEGER:
        is_finite = largest < float("inf")
        narrow = tl.where(is_finite, narrow + ROUNDER - ROUNDER, 0.0)
        scale = tl.where(is_finite, scale, float("nan"))
    tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + row * width + column, narrow.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scale_product_kernel(
    product_ptr,  # [num_rows, width] int32
    row_scales_ptr,  # [num_rows]
    scales_ptr,  # [width]
    bias_ptr,  # [width], with HAS_BIAS
    out_ptr,  # [num_rows, width]
    width,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: [num_rows, cdiv(width, BLOCK)]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    product = tl.load(product_ptr + row * width + column, mask=mask, other=0).to(tl.float32)
    product = product * tl.load(row_scales_ptr + row) * tl.load(scales_ptr + column, mask=mask, other=0.0)
    if HAS_BIAS:
        product += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, product.to(out_ptr.dtype.element_ty), mask=mask)


@lru_cache(MAX_LAUNCHES)
def _launch(config: LaunchConfig, x_stride: int, width: int) -> KernelLauncher:
    constants = {"x_stride": x_stride, "width": width, "least_scale": LEAST_SCALE, "BLOCK": config.block}
    return KernelLauncher(quantize_rows_kernel, constants, num_warps=config.num_warps)


@lru_cache(MAX_LAUNCHES)
def _scale_product(config: LaunchConfig, width: int, has_bias: bool) -> KernelLauncher:
    constants = {"width": width, "HAS_BIAS": has_bias, "BLOCK": config.block}
    return KernelLauncher(scale_product_kernel, constants, num_warps=config.num_warps)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype = FP8, multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [num_rows, width] rounded to `dtype`, and a float32 scale for each row [num_rows, 1].

    The number of rounded rows is raised to a multiple of `multiple`; rows beyond num_rows are not written.
    """
    num_rows, width = x.shape
    out = torch.empty(cdiv(num_rows, multiple) * multiple, width, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    if num_rows:
        _launch(row_config(width), x.stride(0), width)((num_rows, 1, 1), (x, out, scales))
    return out, scales


def scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if weight.dtype == torch.int8:
        return _by_integers(x, weight, scales, bias)
    narrow, of_rows = quantize_rows(x)
    return torch._scaled_mm(
        narrow, weight.T, of_rows, scales.T, bias=bias, out_dtype=x.dtype, use_fast_accum=is_on("fast_accumulation")
    )


def _by_integers(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    num_rows, width = x.shape[0], weight.shape[0]
    out = x.new_empty((num_rows, width))
    if num_rows:
        narrow, of_rows = quantize_rows(x, torch.int8, ROW_MULTIPLE)
        product, config = torch._int_mm(narrow, weight.T), elementwise_config(width)
        launch = _scale_product(config, width, bias is not None)
        launch((num_rows, cdiv(width, config.block), 1), (product, of_rows, scales, x if bias is None else bias, out))
    return out
