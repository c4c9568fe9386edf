from __future__ import annotations

import torch

from tidewheel_kernels.choice import Op
from tidewheel_kernels.invariant_linear.reference import invariant_linear_reference


def invariant_linear(
    x: torch.Tensor,  # [num_tokens, in_features], last dimension contiguous
    weight: torch.Tensor,  # [out_features, in_features] in x's dtype, contiguous
    bias: torch.Tensor | None = None,  # [out_features] in x's dtype
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` [num_tokens, out_features] in x's dtype; products and sums are float32.

    The triton-lang kernel's result for a row is bitwise the same beside any other rows.
    """
    if weight.dtype != x.dtype or x.shape[1] != weight.shape[1] or not weight.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} in {x.dtype} and weight {tuple(weight.shape)} in {weight.dtype} do not fit, or the "
            "weight is not contiguous"
        )
    return _OP.chosen[x.device, x.dtype](x, weight, bias)


_OP = Op("invariant_linear", __name__, reference=invariant_linear_reference)
