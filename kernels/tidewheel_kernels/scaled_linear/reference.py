from __future__ import annotations

import torch

from tidewheel_kernels.kv_cache.reference import FP8, LARGEST

LEAST_SCALE = 2.0**-100  # of zeros


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` [rows, columns] divided by scales [rows, 1] float32, as float8_e4m3fn, and the scales.

    The largest magnitude of a row becomes the largest 8-bit float.
    """
    values = x.float()
    scales = (values.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    return (values / scales).to(FP8), scales


def scaled_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    narrow, of_rows = quantize_rows(x)
    product = (narrow.float() @ weight.float().T) * of_rows * scales.T
    return (product if bias is None else product + bias.float()).to(x.dtype)
