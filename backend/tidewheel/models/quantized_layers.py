"""Layouts of quantised layers in safetensors, and their matrices as `GroupedWeights`.

AWQ: AutoAWQ, awq/utils/packing_utils.py. GPTQ: AutoGPTQ, nn_modules/qlinear/qlinear_cuda.py; zeros of both versions:
GPTQModel, utils/model.py. compressed-tensors: compressors/quantized_compressors/pack_quantized.py. fp8: transformers,
integrations/finegrained_fp8.py and fbgemm_fp8.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tidewheel.models.linear import GroupFormat
from tidewheel_kernels.grouped_linear import GroupedWeights
from tidewheel_kernels.grouped_linear.reference import Bits

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WORDS = (torch.int32,)
INDICES = (torch.int32, torch.int64)
GROUP_SIZES = (128, 64, 32)  # of `GroupedWeights`
ROUNDED = GroupFormat(8)  # one product serves every device, scale and order
AWQ_FIELDS = [0, 4, 1, 5, 2, 6, 3, 7]  # field of a word, by output

Tensors = Mapping[str, torch.Tensor]  # by the last part of their names


class MatrixSize(NamedTuple):
    out_features: int
    in_features: int


class TensorForm(NamedTuple):
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]  # accepted
    is_required: bool = True


class Layout(ABC):
    main = "weight"  # tensor of the codes
    main_dtypes = WORDS

    def size(self, rows: int, columns: int) -> MatrixSize:
        """Return the matrix's size from the main tensor's shape."""
        return MatrixSize(rows, columns)

    @abstractmethod
    def forms(self, size: MatrixSize) -> dict[str, TensorForm]:
        """Return the other tensors. Raise `ValueError` for a size that has none."""

    @abstractmethod
    def format(self, tensors: Tensors, size: MatrixSize) -> GroupFormat:
        """Return the matrix's format from the tensors in `forms`. Raise `ValueError`."""

    @abstractmethod
    def matrix(self, tensors: Tensors, size: MatrixSize) -> GroupedWeights | torch.Tensor:
        """Return the matrix on its tensors' device, as float32 if it is to be `ROUNDED`."""


@dataclass(frozen=True)
class IntegerLayout(Layout):
    """Codes of 4 or 8 bits with values ``scale * (code - zero)``, a scale and a zero by output and group of inputs.

    Groups of scattered inputs (act-order) are rounded: products gather no inputs, and q, k and v stay one matrix.
    """

    bits: Bits
    group_size: int  # 0: a whole row
    needs_order: bool  # the file must have groups by input

    @abstractmethod
    def codes(self, tensors: Tensors) -> torch.Tensor:
        """Return the codes [out, in * bits / 8] uint8 as `GroupedWeights` holds them."""

    @abstractmethod
    def levels(self, tensors: Tensors, size: MatrixSize) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales and zeros [out, num_groups] float32."""

    def num_groups(self, size: MatrixSize) -> int:
        if size.in_features % (self.group_size or 1):
            raise ValueError(f"{size.in_features} inputs are not groups of group_size {self.group_size}")
        return size.in_features // (self.group_size or size.in_features)

    def format(self, tensors: Tensors, size: MatrixSize) -> GroupFormat:
        scales, zeros = self.levels(tensors, size)
        if not (scales * zeros.clamp(min=1)).half().isfinite().all():
            raise ValueError("its scales have values that are not finite, or that float16 cannot hold")
        groups, num_groups = self._groups(tensors, size), self.num_groups(size)
        if not 0 <= groups.min() <= groups.max() < num_groups:
            raise ValueError(f"its inputs are in groups {groups.min()} to {groups.max()} of {num_groups}")
        group_size = successive_inputs(groups)
        return GroupFormat(self.bits, group_size, self._has_minimums(zeros)) if group_size else ROUNDED

    def matrix(self, tensors: Tensors, size: MatrixSize) -> GroupedWeights | torch.Tensor:
        codes, (scales, zeros), groups = self.codes(tensors), self.levels(tensors, size), self._groups(tensors, size)
        group_size = successive_inputs(groups)
        if group_size is None:
            return unpack(codes, self.bits).float().sub_(zeros[:, groups]).mul_(scales[:, groups])
        stored = groups[::group_size]
        minimums = (-scales * zeros)[:, stored].half() if self._has_minimums(zeros) else None
        return GroupedWeights(codes, scales[:, stored].half(), minimums, self.bits)

    def _groups(self, tensors: Tensors, size: MatrixSize) -> torch.Tensor:
        """Return the group [in] int64 of each input."""
        index = tensors.get("g_idx", tensors.get("weight_g_idx"))
        if index is not None:
            return index.long()
        device = next(iter(tensors.values())).device
        return torch.arange(size.in_features, device=device) // (self.group_size or size.in_features)

    def _has_minimums(self, zeros: torch.Tensor) -> bool:
        return bool((zeros != 1 << self.bits - 1).any())


def successive_inputs(groups: torch.Tensor) -> int | None:
    """Return the largest of `GROUP_SIZES` by which successive inputs share a group, or None."""
    for size in GROUP_SIZES:
        if len(groups) % size == 0 and (groups == groups[::size].repeat_interleave(size)).all():
            return size
    return None


def num_words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes [rows, n] uint8 that words of uint8 or int32 hold, lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), 2).flatten(1)


@dataclass(frozen=True)
class GptqLayout(IntegerLayout):
    """qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out], g_idx [in]."""

    main = "qweight"
    zeros_less_one: bool = False  # version 1

    def size(self, rows: int, columns: int) -> MatrixSize:
        return MatrixSize(columns, rows * 32 // self.bits)

    def forms(self, size: MatrixSize) -> dict[str, TensorForm]:
        num_groups, out = self.num_groups(size), size.out_features
        return {
            "qzeros": TensorForm(WORDS, ((num_groups, num_words(out, self.bits)),)),
            "scales": TensorForm(FLOATS, ((num_groups, out),)),
            "g_idx": TensorForm(INDICES, ((size.in_features,),), self.needs_order),
        }

    def codes(self, tensors: Tensors) -> torch.Tensor:
        return tensors["qweight"].t().contiguous().view(torch.uint8)

    def levels(self, tensors: Tensors, size: MatrixSize) -> tuple[torch.Tensor, torch.Tensor]:
        words = tensors["qzeros"]
        if self.zeros_less_one:
            # Writers subtract from whole words: a zero of 0 borrows from the next field.
            words = words + (0x11111111 if self.bits == 4 else 0x01010101)
        return tensors["scales"].t().float(), self.unpack_outputs(words)[:, : size.out_features].t().float()

    def unpack_outputs(self, words: torch.Tensor) -> torch.Tensor:
        """Return words packed along the outputs as codes [rows, outputs] uint8."""
        return unpack(words, self.bits)


class AwqLayout(GptqLayout):
    """Like GPTQ, with qweight [in, out / 8] and the 8 outputs of a word interleaved."""

    def size(self, rows: int, columns: int) -> MatrixSize:
        return MatrixSize(columns * 8, rows)

    def codes(self, tensors: Tensors) -> torch.Tensor:
        codes = self.unpack_outputs(tensors["qweight"]).t().contiguous()
        return codes[:, 0::2] | codes[:, 1::2] << 4

    def unpack_outputs(self, words: torch.Tensor) -> torch.Tensor:
        return unpack(words, 4).view(len(words), -1, 8)[..., AWQ_FIELDS].flatten(1)


@dataclass(frozen=True)
class CompressedLayout(IntegerLayout):
    """weight [out, in] int8, and weight_scale and weight_zero_point [out, groups], or one of each for the tensor."""

    main_dtypes = (torch.int8,)
    is_symmetric: bool
    rounds_inputs: bool = False

    def format(self, tensors: Tensors, size: MatrixSize) -> GroupFormat:
        return super().format(tensors, size)._replace(rounds_inputs=self.rounds_inputs)

    def forms(self, size: MatrixSize) -> dict[str, TensorForm]:
        out, num_groups = size.out_features, self.num_groups(size)
        shapes = ((out, num_groups), (), (1,)) if num_groups == 1 else ((out, num_groups),)
        packed = (num_words(out, self.bits), num_groups)
        return {
            "weight_scale": TensorForm(FLOATS, shapes),
            "weight_zero_point": TensorForm((torch.int8, *WORDS), (*shapes, packed), not self.is_symmetric),
            "weight_shape": TensorForm(INDICES, ((2,),), is_required=False),
            "weight_g_idx": TensorForm(INDICES, ((size.in_features,),), self.needs_order),
        }

    def codes(self, tensors: Tensors) -> torch.Tensor:
        return tensors["weight"].view(torch.uint8) ^ 0x80

    def levels(self, tensors: Tensors, size: MatrixSize) -> tuple[torch.Tensor, torch.Tensor]:
        if "weight_shape" in tensors and tensors["weight_shape"].tolist() != list(size):
            raise ValueError(f"weight_shape is {tensors['weight_shape'].tolist()}, and the codes are {list(size)}")
        scales, middle = _expanded(tensors["weight_scale"], size), 1 << self.bits - 1
        zeros = tensors.get("weight_zero_point")
        if zeros is None:
            return scales, torch.full_like(scales, middle)
        if zeros.dtype == torch.int8:
            return scales, _expanded(zeros, size) + middle
        return scales, unpack(zeros.t(), self.bits)[:, : size.out_features].t().float()


class PackedLayout(CompressedLayout):
    """Like `CompressedLayout`, with weight_packed [out, in * bits / 32] and zeros packed along the outputs."""

    main = "weight_packed"
    main_dtypes = WORDS

    def size(self, rows: int, columns: int) -> MatrixSize:
        return MatrixSize(rows, columns * 32 // self.bits)

    def codes(self, tensors: Tensors) -> torch.Tensor:
        return tensors["weight_packed"].view(torch.uint8)


def _expanded(levels: torch.Tensor, size: MatrixSize) -> torch.Tensor:
    """Return scales or zeros of any accepted shape as [out, groups] float32."""
    return levels.float().reshape(-1, levels.shape[-1] if levels.dim() == 2 else 1).expand(size.out_features, -1)


@dataclass(frozen=True)
class Fp8Layout(Layout):
    """weight [out, in] float8_e4m3fn, with a scale for the tensor, for each output, or for each block."""

    main_dtypes = (torch.float8_e4m3fn,)
    block: tuple[int, int] | None  # outputs, inputs

    def forms(self, size: MatrixSize) -> dict[str, TensorForm]:
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (size.out_features,), (size.out_features, 1))
        if self.block is not None:
            shapes = (tuple(-(-length // block) for length, block in zip(size, self.block, strict=True)),)
        return {"weight_scale": TensorForm(FLOATS, shapes)}

    def format(self, tensors: Tensors, size: MatrixSize) -> GroupFormat:
        if not self._scales(tensors, size).half().isfinite().all():
            raise ValueError("weight_scale has values that are not finite, or that float16 cannot hold")
        return ROUNDED

    def matrix(self, tensors: Tensors, size: MatrixSize) -> torch.Tensor:
        return tensors["weight"].float().mul_(self._scales(tensors, size))

    def _scales(self, tensors: Tensors, size: MatrixSize) -> torch.Tensor:
        scales = tensors["weight_scale"].float()
        if self.block is None:
            return scales.reshape(-1, 1)
        for axis, (length, block) in enumerate(zip(size, self.block, strict=True)):
            scales = scales.repeat_interleave(min(block, length), axis).narrow(axis, 0, length)
        return scales
