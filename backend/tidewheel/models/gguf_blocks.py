"""Quantised blocks of GGUF as `GroupedWeights` (layouts: ggml-common.h of llama.cpp, and `gguf.quants`).

Q8_0 and the types of 4 and 5 bits keep their codes, 5 bits in 8. Scales and minimums of K types, products of two
numbers, are rounded to float16. Other types are dequantised and rounded to 8 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import gguf.quants
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tidewheel.models.linear import GroupFormat
from tidewheel_kernels.grouped_linear import GroupedWeights, join_outputs, quantize_groups

PIECE_BLOCKS = 1 << 18  # converted at a time, which bounds temporary memory
DTYPES = {
    GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16, GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.I8: torch.int8, GGMLQuantizationType.I16: torch.int16,
    GGMLQuantizationType.I32: torch.int32, GGMLQuantizationType.I64: torch.int64,
}  # fmt: skip
# Codes [num_blocks, block] uint8, scales [num_blocks, groups] float16, and minimums like scales or None.
BlockParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the float16 at byte `begin` of each block, [num_blocks, 1]."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of 4 bits [..., 2 n] of bytes [..., n]: all low halves, then all high halves."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)


def _fifth_bits(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Return each bit of bytes [num_blocks, n] as 0 or 16, the lowest first along dimension `dim`, flattened."""
    shape = (1, 8, 1) if dim == 1 else (1, 1, 8)
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device).view(shape)
    return (((packed.unsqueeze(dim) >> bits) & 1) << 4).flatten(1)


def _q8_0(blocks: torch.Tensor) -> BlockParts:
    return blocks[:, 2:] ^ 0x80, _half(blocks, 0), None


def _q4_0(blocks: torch.Tensor) -> BlockParts:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> BlockParts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> BlockParts:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6], 2)
    return codes + (128 - 16), _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> BlockParts:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8], 2), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> BlockParts:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1), *_k_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> BlockParts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1)
    return low | _fifth_bits(blocks[:, 16:48], 1), *_k_scales(blocks)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minimums [num_blocks, 8]: a float16 of the block each, times factors of 6 bits."""
    scales, minimums, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scales & 0x3F, (high & 0x0F) | ((scales >> 2) & 0x30)), dim=1)
    minimums = torch.cat((minimums & 0x3F, (high >> 4) | ((minimums >> 2) & 0x30)), dim=1)
    return (_half(blocks, 0).float() * scales).half(), (-_half(blocks, 2).float() * minimums).half()


FORMATS: dict[GGMLQuantizationType, tuple[GroupFormat, Callable[[torch.Tensor], BlockParts]]] = {
    GGMLQuantizationType.Q8_0: (GroupFormat(8), _q8_0),
    GGMLQuantizationType.Q4_0: (GroupFormat(4), _q4_0),
    GGMLQuantizationType.Q4_1: (GroupFormat(4, has_minimums=True), _q4_1),
    GGMLQuantizationType.Q5_0: (GroupFormat(8), _q5_0),
    GGMLQuantizationType.Q5_1: (GroupFormat(8, has_minimums=True), _q5_1),
    GGMLQuantizationType.Q4_K: (GroupFormat(4, has_minimums=True), _q4_k),
    GGMLQuantizationType.Q5_K: (GroupFormat(8, has_minimums=True), _q5_k),
}


def group_format(kind: GGMLQuantizationType) -> GroupFormat:
    return FORMATS[kind][0] if kind in FORMATS else GroupFormat(8)


@functools.cache
def is_readable(kind: GGMLQuantizationType) -> bool:
    """Return whether torch has the type, or `gguf.quants` dequantises it."""
    if kind in DTYPES:
        return True
    try:
        gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def rows_of_a_piece(rows: torch.Tensor, kind: GGMLQuantizationType) -> int:
    """Return how many raw rows to convert at a time."""
    return max(PIECE_BLOCKS * GGML_QUANT_SIZES[kind][1] // rows.shape[1], 1)


def dequantize_rows(rows: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    """Return [num_rows, in_features] float32 of raw rows [num_rows, row_bytes] uint8. Raise `ValueError` for NaN."""
    with np.errstate(all="ignore"):
        return _finite(torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind)))


def group_rows(rows: torch.Tensor, kind: GGMLQuantizationType, device: torch.device) -> GroupedWeights:
    """Return the matrix of raw rows [num_rows, row_bytes] uint8 on `device`. Raise `ValueError` for NaN."""
    return join_outputs([_group(piece, kind, device) for piece in torch.split(rows, rows_of_a_piece(rows, kind))])


def _group(rows: torch.Tensor, kind: GGMLQuantizationType, device: torch.device) -> GroupedWeights:
    if kind not in FORMATS:
        return quantize_groups(dequantize_rows(rows, kind).to(device), 8)
    form, read = FORMATS[kind]
    codes, scales, minimums = read(rows.to(device).view(-1, GGML_QUANT_SIZES[kind][1]))
    codes = codes.reshape(len(rows), -1)
    if form.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    minimums = None if minimums is None else _finite(minimums).view(len(rows), -1)
    return GroupedWeights(codes, _finite(scales).view(len(rows), -1), minimums, form.bits)


def _finite(values: torch.Tensor) -> torch.Tensor:
    if not values.isfinite().all():
        raise ValueError("it has scales that are not finite")
    return values
