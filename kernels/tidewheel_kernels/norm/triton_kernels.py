from functools import lru_cache

import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import LaunchConfig, row_config, starts_early
from tidewheel_kernels.norm.reference import NormResult
from tidewheel_kernels.triton_early import wait_for_inputs
from tidewheel_kernels.triton_launch import MAX_LAUNCHES, KernelLauncher


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [num_tokens, hidden]
    residual_ptr,  # [num_tokens, hidden]
    weight_ptr,  # [hidden]
    out_ptr,  # [num_tokens, hidden]
    sum_ptr,  # [num_tokens, hidden]
    x_stride,
    residual_stride,
    hidden,
    eps,
    weight_offset,
    HAS_RESIDUAL: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: [num_tokens]
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    # Load before waiting for the reduction and for the previous kernel.
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    wait_for_inputs(STARTS_EARLY)
    x = tl.load(x_ptr + token * x_stride + column, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + token * residual_stride + column, mask=mask, other=0.0)
        # Round first: the next layer reads the rounded sum.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + token * hidden + column, x, mask=mask)
    values = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / hidden + eps)
    normed = values * scale * (weight.to(tl.float32) + weight_offset)
    tl.store(out_ptr + token * hidden + column, normed.to(out_ptr.dtype.element_ty), mask=mask)


@lru_cache(MAX_LAUNCHES)
def _launch(
    config: LaunchConfig,
    hidden: int,
    x_stride: int,
    residual_stride: int,
    eps: float,
    weight_offset: float,
    has_residual: bool,
    early: bool,
) -> KernelLauncher:
    constants = {
        "x_stride": x_stride,
        "residual_stride": residual_stride,
        "hidden": hidden,
        "eps": eps,
        "weight_offset": weight_offset,
        "HAS_RESIDUAL": has_residual,
        "STARTS_EARLY": early,
        "BLOCK": config.block,
    }
    return KernelLauncher(rms_norm_kernel, constants, num_warps=config.num_warps, launch_pdl=early)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> NormResult:
    num_tokens, hidden = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = out if residual is None else torch.empty_like(out)
    if num_tokens:
        other = x if residual is None else residual
        launch = _launch(
            row_config(hidden), hidden, x.stride(0), other.stride(0), eps, weight_offset, residual is not None,
            starts_early(x.device),
        )  # fmt: skip
        launch((num_tokens, 1, 1), (x, other, weight, out, total))
    return out if residual is None else (out, total)
