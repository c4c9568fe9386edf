"""Quantised blocks of GGUF as `GroupedWeights` (layouts: ggml-common.h of llama.cpp, and `gguf.quants`).

Q8_0 and types of 4 and 5 bits keep their codes, 5 bits in 8. Scales and minimums of K types are rounded to float16,
other types to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import gguf.quants
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tidewheel.models.linear import GroupFormat
from tidewheel.models.weight_stream import num_readers
from tidewheel_kernels.grouped_linear import GroupedWeights, join_outputs, quantize_groups

PIECE_BLOCKS = 1 << 18  # converted at a time
DTYPES = {
    GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16, GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.I8: torch.int8, GGMLQuantizationType.I16: torch.int16,
    GGMLQuantizationType.I32: torch.int32, GGMLQuantizationType.I64: torch.int64,
}  # fmt: skip
# Codes [num_blocks, block] uint8, scales [num_blocks, groups] float16, minimums like scales.
BlockParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the float16 at byte `begin` of each block, [num_blocks, 1]."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16)


def _low_bits(blocks: torch.Tensor, width: int) -> torch.Tensor:
    """Return codes of 4 bits: of each `width` bytes all low halves, then all high halves."""
    packed = blocks.reshape(len(blocks), -1, width)
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1).flatten(1)


def _fifth_bits(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Return bits of bytes [num_blocks, n] as 0 or 16, the lowest first along `dim`, flattened."""
    shape = (1, 8, 1) if dim == 1 else (1, 1, 8)
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device).view(shape)
    return (((packed.unsqueeze(dim) >> bits) & 1) << 4).flatten(1)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minimums [num_blocks, 8], products of a float16 and 6 bits."""
    scales, minimums, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scales & 0x3F, (high & 0x0F) | ((scales >> 2) & 0x30)), dim=1)
    minimums = torch.cat((minimums & 0x3F, (high >> 4) | ((minimums >> 2) & 0x30)), dim=1)
    return (_half(blocks, 0).float() * scales).half(), (-_half(blocks, 2).float() * minimums).half()


FORMATS: dict[GGMLQuantizationType, tuple[GroupFormat, Callable[[torch.Tensor], BlockParts]]] = {
    GGMLQuantizationType.Q8_0: (GroupFormat(8), lambda raw: (raw[:, 2:] ^ 0x80, _half(raw, 0), None)),
    GGMLQuantizationType.Q4_0: (GroupFormat(4), lambda raw: (_low_bits(raw[:, 2:], 16), _half(raw, 0), None)),
    GGMLQuantizationType.Q4_1: (
        GroupFormat(4, has_minimums=True),
        lambda raw: (_low_bits(raw[:, 4:], 16), _half(raw, 0), _half(raw, 2)),
    ),
    GGMLQuantizationType.Q5_0: (
        GroupFormat(8),
        lambda raw: ((_low_bits(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6], 2)) + (128 - 16), _half(raw, 0), None),
    ),
    GGMLQuantizationType.Q5_1: (
        GroupFormat(8, has_minimums=True),
        lambda raw: (_low_bits(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8], 2), _half(raw, 0), _half(raw, 2)),
    ),
    GGMLQuantizationType.Q4_K: (
        GroupFormat(4, has_minimums=True),
        lambda raw: (_low_bits(raw[:, 16:], 32), *_k_scales(raw)),
    ),
    GGMLQuantizationType.Q5_K: (
        GroupFormat(8, has_minimums=True),
        lambda raw: (_low_bits(raw[:, 48:], 32) | _fifth_bits(raw[:, 16:48], 1), *_k_scales(raw)),
    ),
}


def matrix_format(kind: GGMLQuantizationType) -> torch.dtype | GroupFormat | None:
    """Return the format of a type's matrices, None if `gguf.quants` lacks the type."""
    if kind in DTYPES:
        return DTYPES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return None
    return FORMATS[kind][0] if kind in FORMATS else GroupFormat(8)


def _rows_of_a_piece(rows: torch.Tensor, kind: GGMLQuantizationType) -> int:
    return max(PIECE_BLOCKS * GGML_QUANT_SIZES[kind][1] // rows.shape[1], 1)


def dequantize_rows(rows: torch.Tensor, kind: GGMLQuantizationType, destination: torch.Tensor) -> None:
    """Write raw rows [num_rows, row_bytes] uint8 as floats [num_rows, in_features]. Raise `ValueError` for NaN."""
    size = _rows_of_a_piece(rows, kind)

    def convert(raw: torch.Tensor, piece: torch.Tensor) -> None:
        piece.copy_(_floats(raw, kind))

    with ThreadPoolExecutor(num_readers(), thread_name_prefix="dequantize") as pool:
        list(pool.map(convert, torch.split(rows, size), torch.split(destination, size)))


def _floats(rows: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return _finite(torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind)))


def group_rows(rows: torch.Tensor, kind: GGMLQuantizationType, device: torch.device) -> GroupedWeights:
    """Return the matrix of raw rows [num_rows, row_bytes] uint8 on `device`. Raise `ValueError` for NaN."""
    pieces = torch.split(rows, _rows_of_a_piece(rows, kind))
    return join_outputs([_group(piece, kind, device) for piece in pieces])


def _group(rows: torch.Tensor, kind: GGMLQuantizationType, device: torch.device) -> GroupedWeights:
    if kind not in FORMATS:
        return quantize_groups(_floats(rows, kind).to(device), 8)
    form, read = FORMATS[kind]
    codes, scales, minimums = read(rows.to(device).view(-1, GGML_QUANT_SIZES[kind][1]))
    codes = codes.reshape(len(rows), -1)
    if form.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    minimums = None if minimums is None else _finite(minimums).view(len(rows), -1)
    return GroupedWeights(codes, _finite(scales).view(len(rows), -1), minimums, form.bits)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Return the values. Raise `ValueError` for NaN or infinity."""
    if not values.isfinite().all():
        raise ValueError("it has scales that are not finite")
    return values
