from __future__ import annotations

import torch

from tidewheel_kernels.choice import Op, preference_for
from tidewheel_kernels.grouped_linear.lanes import LaneWeights
from tidewheel_kernels.grouped_linear.reference import (
    INPUT_GROUP,
    GroupedWeights,
    dequantize,
    grouped_linear_reference,
    join_outputs,
    quantize_groups,
    signed_by_output,
)
from tidewheel_kernels.native.library import (
    ELEMENTS,
    LONG,
    POINTER,
    THREADS,
    NativeKernel,
    mixed_dtypes,
    native_library,
)
from tidewheel_kernels.scaled_linear import scaled_linear

ArrangedWeights = GroupedWeights | LaneWeights

_grouped_linear = NativeKernel("grouped_linear", *[POINTER] * 5, *[LONG] * 2, THREADS)
_grouped_embedding = NativeKernel("grouped_embedding", *[POINTER] * 3, LONG, THREADS)
FEW_ROWS = 16  # at most: not rounded for signed weights
WORDS_PER_INPUT_GROUP = INPUT_GROUP // 2 + 3  # room for codes of 16 bits; scale, sum, and first sum of products


def arrange(weights: GroupedWeights, dtype: torch.dtype, *, rounds_inputs: bool = False) -> ArrangedWeights:
    """Return weights in lanes for the C kernel; elsewhere as they are, or signed with `rounds_inputs`."""
    if weights.codes.device.type == "cpu" and preference_for("grouped_linear") == "auto":
        return LaneWeights(weights) if native_library(dtype) is not None else weights
    return signed_by_output(weights) if rounds_inputs else weights


def grouped_linear(
    x: torch.Tensor,  # [num_rows, in_features], last dimension contiguous
    weights: ArrangedWeights,
    bias: torch.Tensor | None = None,  # [out_features] in x's dtype
) -> torch.Tensor:
    """Return ``x @ weights.T + bias`` [num_rows, out_features] in x's dtype; sums are float32.

    The C kernel rounds x to 8 bits, with a scale by row and 32 inputs. For signed weights x is rounded too, if it has
    more than `FEW_ROWS`, with a scale by row. NaN or infinity stays in its row.
    """
    if x.shape[1] != weights.in_features:
        raise ValueError(f"x has {x.shape[1]} inputs, and the weights {weights.in_features}")
    if isinstance(weights, GroupedWeights) and weights.is_signed and x.shape[0] > FEW_ROWS:
        return scaled_linear(x, weights.codes, weights.scales, bias)
    return _OP.chosen[x.device, x.dtype](x, weights, bias)


def grouped_linear_native(x: torch.Tensor, weights: ArrangedWeights, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is not None and bias.dtype != x.dtype:
        raise mixed_dtypes(x.dtype, bias)
    if isinstance(weights, GroupedWeights):
        return grouped_linear_reference(x, weights, bias)
    num_rows = x.shape[0]
    out = torch.empty(num_rows, weights.out_features, dtype=x.dtype)
    scratch = torch.empty(num_rows * weights.in_features // INPUT_GROUP * WORDS_PER_INPUT_GROUP, dtype=torch.float32)
    _grouped_linear[x.dtype](
        weights.address, x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), scratch.data_ptr(),
        num_rows, x.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return out


def _by_reference(x: torch.Tensor, weights: ArrangedWeights, bias: torch.Tensor | None) -> torch.Tensor:
    by_rows = weights if isinstance(weights, GroupedWeights) else weights.by_rows()
    return grouped_linear_reference(x, by_rows, bias)


def grouped_embedding(
    token_ids: torch.Tensor,  # [num_tokens] int64 or int32
    weights: ArrangedWeights,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the rows [num_tokens, in_features] of the token ids in `dtype`."""
    if isinstance(weights, LaneWeights):
        if dtype in ELEMENTS:
            return _native_embedding(token_ids.long().contiguous(), weights, dtype)
        return dequantize(weights.outputs(token_ids)).to(dtype)
    minimums = None if weights.minimums is None else weights.minimums[token_ids]
    rows = GroupedWeights(weights.codes[token_ids], weights.scales[token_ids], minimums, weights.bits)
    return dequantize(rows).to(dtype)


def _native_embedding(token_ids: torch.Tensor, weights: LaneWeights, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(len(token_ids), weights.in_features, dtype=dtype)
    _grouped_embedding[dtype](
        weights.address, token_ids.data_ptr(), out.data_ptr(), len(token_ids), torch.get_num_threads()
    )
    return out


_OP = Op("grouped_linear", __name__, reference=_by_reference, cpu=_by_reference, native=grouped_linear_native)

__all__ = [
    "ArrangedWeights",
    "GroupedWeights",
    "LaneWeights",
    "arrange",
    "dequantize",
    "grouped_embedding",
    "grouped_linear",
    "join_outputs",
    "quantize_groups",
    "signed_by_output",
]
