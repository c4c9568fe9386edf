"""One program normalises a token, with its row in registers."""

import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import row_config
from tidewheel_kernels.norm.reference import NormResult


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
    BLOCK: tl.constexpr,
):
    # grid: [num_tokens]
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    x = tl.load(x_ptr + token * x_stride + column, mask=mask, other=0.0)
    # Load before the reduction, which threads wait for.
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + token * residual_stride + column, mask=mask, other=0.0)
        # Round first: the next layer reads the rounded sum.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + token * hidden + column, x, mask=mask)
    values = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / hidden + eps)
    normed = values * scale * (weight.to(tl.float32) + weight_offset)
    tl.store(out_ptr + token * hidden + column, normed.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> NormResult:
    num_tokens, hidden = x.shape
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    if num_tokens:
        other = x if residual is None else residual
        config = row_config(hidden)
        rms_norm_kernel[(num_tokens,)](
            x_ptr=x,
            residual_ptr=other,
            weight_ptr=weight,
            out_ptr=out,
            sum_ptr=total,
            x_stride=x.stride(0),
            residual_stride=other.stride(0),
            hidden=hidden,
            eps=eps,
            weight_offset=weight_offset,
            HAS_RESIDUAL=residual is not None,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )
    return out if residual is None else (out, total)
