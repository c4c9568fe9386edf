from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

Bits = Literal[4, 8]
GROUP_SIZES = (32, 64, 128)
INPUT_GROUP = 32  # inputs that the C kernel rounds with one scale
LARGEST = 127  # magnitude of a number rounded to 8 bits
LEAST = 2.0**-100  # magnitude whose reciprocal is finite
PIECE_VALUES = 1 << 20  # rounded at once: each takes some 20 bytes meanwhile
INT8_MULTIPLE = 8  # outputs of torch._int_mm on a GPU


class _Fields(NamedTuple):
    codes: torch.Tensor  # [out_features, in_features * bits / 8] uint8, or int8: see `signed_by_output`
    scales: torch.Tensor  # [out_features, in_features / group_size] float16, finite
    minimums: torch.Tensor | None  # like scales; None: code ``2**(bits - 1)`` stands for 0
    bits: Bits


class GroupedWeights(_Fields):
    """Matrix [out_features, in_features] ``scales * codes + minimums``; successive inputs of an output share a scale.

    Of 4 bits, byte ``i`` has input ``2 * i`` in its low half, and ``2 * i + 1`` in its high half.
    """

    __slots__ = ()

    def __new__(
        cls, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None, bits: Bits
    ) -> GroupedWeights:
        weights = super().__new__(cls, codes, scales, minimums, bits)
        _check(weights)
        return weights

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    @property
    def group_size(self) -> int:
        return self.in_features // self.scales.shape[1]

    @property
    def is_signed(self) -> bool:
        return self.codes.dtype == torch.int8

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.minimums) if part is not None)


def _check(weights: GroupedWeights) -> None:
    """Raise `ValueError` for parts that do not fit; scales are not read."""
    codes, scales, minimums, bits = weights
    is_signed = weights.is_signed and bits == 8 and minimums is None and scales.shape[1:] == (1,)
    if bits not in (4, 8) or not (is_signed or codes.dtype == torch.uint8) or codes.dim() != 2:
        raise ValueError(f"codes are [out, in * bits / 8] uint8 of 4 or 8 bits; got {_shown(codes)}, {bits} bits")
    for name, part in (("scales", scales), ("minimums", minimums)):
        if part is None:
            continue
        if part.dtype != torch.float16 or part.shape != scales.shape or part.shape[:-1] != codes.shape[:1]:
            raise ValueError(f"{name} are [out, groups] float16; got {_shown(part)} for codes {_shown(codes)}")
    sizes = [size for size in GROUP_SIZES if size * scales.shape[1] == weights.in_features]
    if not (is_signed or sizes):
        raise ValueError(
            f"{weights.in_features} inputs with {scales.shape[1]} scales an output are not groups of 32, 64 or 128"
        )


def _shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def quantize_groups(
    weight: torch.Tensor,  # [out_features, in_features] floats
    bits: Bits,
    group_size: int = 32,
) -> GroupedWeights:
    """Round a matrix to 8 bits around 0, or to 4 bits from the minimum of a group. Raise `ValueError` for NaN."""
    if group_size not in GROUP_SIZES or weight.shape[1] % group_size:
        raise ValueError(
            f"{weight.shape[1]} inputs are not groups of {group_size}; use 32, 64 or 128 where it divides"
        )
    pieces = torch.split(weight, max(PIECE_VALUES // weight.shape[1], 1))
    return join_outputs([_quantize_groups(piece, bits, group_size) for piece in pieces])


def _quantize_groups(weight: torch.Tensor, bits: Bits, group_size: int) -> GroupedWeights:
    groups = weight.float().reshape(len(weight), weight.shape[1] // group_size, group_size)
    minimums = groups.amin(-1).half() if bits == 4 else None
    above = groups if minimums is None else groups - minimums.float().unsqueeze(-1)
    scales = (above.abs().amax(-1) / (LARGEST if bits == 8 else 15)).half()
    if not scales.isfinite().all():
        raise ValueError("the weights have values that are not finite, or too large for scales in float16")
    of_groups = scales.float().unsqueeze(-1)
    codes = torch.where(of_groups > 0, above / of_groups, 0.0).round_()
    codes = codes.clamp_(-LARGEST, LARGEST).add_(LARGEST + 1) if bits == 8 else codes.clamp_(0, 15)
    return GroupedWeights(_packed(codes.to(torch.uint8).flatten(1), bits), scales, minimums, bits)


def _packed(codes: torch.Tensor, bits: Bits) -> torch.Tensor:
    return codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4


def _unpacked(weights: GroupedWeights) -> torch.Tensor:
    """Return the codes [out_features, in_features]."""
    codes = weights.codes
    return codes if weights.bits == 8 else torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)


def dequantize(weights: GroupedWeights) -> torch.Tensor:
    """Return the matrix [out_features, in_features] in float32."""
    values = _unpacked(weights).float().view(*weights.scales.shape, weights.group_size)
    if weights.minimums is None and not weights.is_signed:
        values.sub_(1 << weights.bits - 1)
    values.mul_(weights.scales.float().unsqueeze(-1))
    if weights.minimums is not None:
        values.add_(weights.minimums.float().unsqueeze(-1))
    return values.flatten(1)


def signed_by_output(weights: GroupedWeights) -> GroupedWeights:
    """Return 8-bit weights as int8 codes and scales [out, 1], if each output has one scale and no minimum.

    Return other weights as they are.
    """
    codes, scales, minimums, bits = weights
    if bits != 8 or minimums is not None or len(codes) % INT8_MULTIPLE or (scales != scales[:, :1]).any():
        return weights
    return GroupedWeights((codes ^ 0x80).view(torch.int8), scales[:, :1].contiguous(), None, bits)


def join_outputs(parts: Sequence[GroupedWeights]) -> GroupedWeights:
    """Stack the outputs of matrices with the same inputs, exactly.

    Where they differ, 4 bits become 8, groups are split, and minimums added. Raise `ValueError` beyond float16.
    """
    size = min(part.group_size for part in parts)
    bits = max(part.bits for part in parts)
    has_minimums = any(part.minimums is not None for part in parts)
    alike = [_widened(part, size, bits, has_minimums) for part in parts]
    codes, scales = torch.cat([part.codes for part in alike]), torch.cat([part.scales for part in alike])
    minimums = torch.cat([part.minimums for part in alike if part.minimums is not None]) if has_minimums else None
    return GroupedWeights(codes, scales, minimums, bits)


def _widened(weights: GroupedWeights, group_size: int, bits: Bits, has_minimums: bool) -> GroupedWeights:
    times = weights.group_size // group_size
    scales = weights.scales.repeat_interleave(times, 1)
    minimums = None if weights.minimums is None else weights.minimums.repeat_interleave(times, 1)
    if has_minimums and minimums is None:
        minimums = scales * -(1 << weights.bits - 1)
        if not minimums.isfinite().all():
            raise ValueError(f"scales up to {float(scales.max())} have minimums that float16 cannot hold")
    codes = weights.codes
    if weights.bits < bits:
        codes = _unpacked(weights) + (0 if has_minimums else (1 << bits - 1) - (1 << weights.bits - 1))
    return GroupedWeights(codes, scales, minimums, bits)


def round_inputs(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [num_rows, in_features] as float32, rounded to 8 bits with a scale by row and group."""
    groups = x.float().reshape(len(x), x.shape[1] // INPUT_GROUP, INPUT_GROUP)
    most = groups.abs().amax(-1, keepdim=True)
    factor = torch.tensor(float(LARGEST)) / most.clamp(min=LEAST)  # a number would be multiplied by a reciprocal
    rounded: torch.Tensor = (groups * factor).round() * (most / LARGEST)
    return rounded.flatten(1)


def grouped_linear_reference(x: torch.Tensor, weights: GroupedWeights, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.float() @ dequantize(weights).T
    return (product if bias is None else product + bias.float()).to(x.dtype)
