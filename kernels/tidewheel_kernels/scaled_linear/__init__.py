from __future__ import annotations

import torch

from tidewheel_kernels.choice import Op
from tidewheel_kernels.scaled_linear.reference import LARGEST_OF, quantize_rows, scaled_linear_reference

MULTIPLE = 16  # of both sizes of a matrix, on a GPU


def scaled_linear(
    x: torch.Tensor,  # [num_tokens, in_features], last dimension contiguous
    weight: torch.Tensor,  # [out_features, in_features] float8_e4m3fn or int8
    scales: torch.Tensor,  # [out_features, 1], float32 for float8_e4m3fn
    bias: torch.Tensor | None = None,  # [out_features] in x's dtype
) -> torch.Tensor:
    """Return ``x @ (weight * scales).T + bias`` in x's dtype, each row of x rounded to weight's dtype with a scale.

    Products and sums are float32, or int32. A row with NaN or infinity gives NaN, and changes no other.
    """
    if weight.dtype not in LARGEST_OF or x.shape[1] != weight.shape[1] or scales.shape != (weight.shape[0], 1):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} in {weight.dtype} and scales {tuple(scales.shape)} "
            "do not fit"
        )
    return _OP.chosen[x.device, x.dtype](x, weight, scales, bias)


_OP = Op("scaled_linear", __name__, reference=scaled_linear_reference)

__all__ = ["MULTIPLE", "quantize_rows", "scaled_linear"]
