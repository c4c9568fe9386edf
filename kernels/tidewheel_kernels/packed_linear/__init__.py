"""Products with weights that oneDNN packed, on a CPU: by oneDNN for many rows, by a C kernel for few.

The kernel reads oneDNN's layout, if known, so that weights are in memory once.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Mapping

import torch
from torch.nn.functional import pad

from tidewheel_kernels.choice import add_operation, preference_for
from tidewheel_kernels.native.huge_pages import MADV_COLLAPSE, advise
from tidewheel_kernels.native.library import (
    LONG,
    POINTER,
    THREADS,
    NativeKernel,
    mixed_dtypes,
    native_library,
    processor,
)

logger = logging.getLogger(__name__)

# Rows for which oneDNN chooses its layout, which suits fewer too.
PACKED_ROWS = 64
FINELY_PADDED_ROWS = 64


def few_rows(features: Collection[str]) -> Mapping[torch.dtype, int]:
    """Return how many rows the C kernel multiplies faster than oneDNN (benchmarks/engine/cpu_kernels.py).

    `features` are the processor's. oneDNN is faster with AMX, and without the instructions of the kernel's vectors.
    """
    has_products = "avx512_bf16" in features and "amx_bf16" not in features
    return {torch.float32: 64 if "fma" in features else 4, torch.bfloat16: 64 if has_products else 16}


FEW_ROWS = few_rows(processor().split())
BLOCKS = (64, 48, 32, 16)  # outputs
LANE_BYTES = 4

NAME = "packed_linear"
add_operation(NAME)
_packed_linear = NativeKernel(NAME, *[POINTER] * 4, *[LONG] * 2, THREADS)
_packed_as_described = NativeKernel("packed_as_described", *[POINTER] * 3, THREADS)


class _BlockedMatrix(ctypes.Structure):
    """C structure `BlockedMatrix` of blocked_products.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_outputs", "num_inputs", "padded_inputs", "block")),
    )


class PackedWeights:
    """Weights [out_features, in_features] in oneDNN's layout; `address` for C kernels, or None."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        self.out_features, self.in_features = weight.shape
        self._matrix = _blocked(weight, self.packed)
        if self._matrix is not None:
            advise(self._matrix.weights, weight.nbytes, MADV_COLLAPSE)
        self.address = None if self._matrix is None else ctypes.addressof(self._matrix)


def can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _blocked(weight: torch.Tensor, packed: torch.Tensor) -> _BlockedMatrix | None:
    """Return the layout of packed weights, found by comparison: oneDNN's versions differ. None: unknown."""
    if preference_for(NAME) != "auto" or native_library(weight.dtype) is None:
        return None
    readable = hasattr(torch.ops.mkldnn, "data_ptr") and hasattr(torch.ops.mkldnn, "_nbytes")
    if not readable or weight.shape[1] * weight.itemsize % LANE_BYTES:
        return None
    (out_features, in_features), holds = weight.shape, ctypes.c_int32()
    for block in BLOCKS:
        padded_outputs = -(-out_features // block) * block
        padded_inputs, rest = divmod(torch.ops.mkldnn._nbytes(packed) // weight.itemsize, padded_outputs)
        if rest or not in_features <= padded_inputs < in_features + PACKED_ROWS:
            continue
        matrix = _BlockedMatrix(torch.ops.mkldnn.data_ptr(packed), out_features, in_features, padded_inputs, block)
        _packed_as_described[weight.dtype](
            ctypes.addressof(matrix), weight.data_ptr(), ctypes.addressof(holds), torch.get_num_threads()
        )
        if holds.value:
            return matrix
    logger.info(
        "oneDNN's layout of %d x %d weights is not known: it multiplies few rows too", out_features, in_features
    )
    return None


def padded_rows(num_rows: int) -> int:
    """Round up rows, by one at most in decode steps, else by a quarter: oneDNN keeps 0.5 MB per size."""
    steps = 32 if num_rows <= FINELY_PADDED_ROWS else 8
    step = max(1, (1 << max(num_rows - 1, 0).bit_length()) // steps)
    return -(-num_rows // step) * step


def packed_linear(
    x: torch.Tensor,  # [num_rows, in_features], last dimension contiguous
    weights: PackedWeights,
    bias: torch.Tensor | None = None,  # [out_features] in x's dtype
) -> torch.Tensor:
    """Return ``x @ weights.T + bias`` [num_rows, out_features]; sums are float32."""
    num_rows = x.shape[0]
    if weights.address is None or num_rows > FEW_ROWS[x.dtype]:
        return packed_linear_cpu(x, weights, bias)
    if x.shape[1] != weights.in_features:
        raise ValueError(f"x has {x.shape[1]} inputs, and the weights {weights.in_features}")
    if bias is not None and bias.dtype != x.dtype:
        raise mixed_dtypes(x.dtype, bias)
    out = torch.empty(num_rows, weights.out_features, dtype=x.dtype)
    _packed_linear[x.dtype](
        weights.address, x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), num_rows,
        x.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return out


def packed_linear_cpu(x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None) -> torch.Tensor:
    num_rows = x.shape[0]
    extra = padded_rows(num_rows) - num_rows
    if extra:
        x = pad(x, (0, 0, 0, extra))
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weights.packed, bias, "none", [], "")
    return product[:num_rows]
