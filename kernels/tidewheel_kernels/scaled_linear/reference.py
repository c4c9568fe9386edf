from __future__ import annotations

import torch

from tidewheel_kernels.kv_cache.reference import FP8, LARGEST

LEAST_SCALE = 2.0**-100  # of zeros
LARGEST_OF = {FP8: LARGEST, torch.int8: 127.0}  # magnitude


def quantize_rows(x: torch.Tensor, dtype: torch.dtype = FP8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` [rows, columns] divided by scales [rows, 1] float32, as `dtype`, and the scales.

    The largest magnitude of a row becomes `LARGEST_OF` the dtype. NaN or infinity makes a row of int8 zeros, of scale
    NaN.
    """
    values = x.float()
    scales = (values.abs().amax(dim=-1, keepdim=True) / LARGEST_OF[dtype]).clamp(min=LEAST_SCALE)
    if dtype == FP8:
        return (values / scales).to(FP8), scales
    scales = scales.where(scales.isfinite(), torch.nan)
    return (values / scales).round().nan_to_num().to(dtype), scales


def scaled_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    narrow, of_rows = quantize_rows(x, weight.dtype)
    product = (narrow.float() @ weight.float().T) * of_rows * scales.T
    return (product if bias is None else product + bias.float()).to(x.dtype)
