"""Linear layers and the formats of their weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import embedding, linear

from tidewheel.errors import ConfigError
from tidewheel.models.shard import Shard, TensorPart
from tidewheel_kernels import FP8, invariant_linear, quantize_rows, scaled_linear
from tidewheel_kernels.decode_layers import LinearWeights
from tidewheel_kernels.grouped_linear import (
    ArrangedWeights,
    GroupedWeights,
    LaneWeights,
    arrange,
    dequantize,
    grouped_embedding,
    grouped_linear,
    join_outputs,
    quantize_groups,
)
from tidewheel_kernels.lora import LoraGroups, LoraStack, add_lora
from tidewheel_kernels.packed_linear import PackedWeights, can_pack, packed_linear
from tidewheel_kernels.scaled_linear import MULTIPLE as FP8_MULTIPLE


class GroupFormat(NamedTuple):
    """Integers with a float16 scale, and a minimum if `has_minimums`, by output and `group_size` inputs."""

    bits: Literal[4, 8]
    group_size: int = 32
    has_minimums: bool = False
    rounds_inputs: bool = False  # to int8 on a GPU, in products of many rows

    def num_bytes(self, num_weights: int) -> int:
        return num_weights * self.bits // 8 + num_weights // self.group_size * 2 * (1 + self.has_minimums)


MatrixFormat = GroupFormat | Literal["fp8"] | None  # None: the model's dtype
Split = Literal["none", "outputs", "inputs", "vocabulary"]  # how ranks share a matrix
FormatChoice = Callable[[Sequence[str]], MatrixFormat]  # of matrices that one layer holds, by checkpoint names


class Linear:
    """Product ``x @ weight.T + bias``. With a `format`, `weight` is on the device "meta" until `fill`."""

    shard = Shard()
    lora: LoraStack | None = None  # adapters' matrices

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, form: MatrixFormat, parts: Mapping[str, int]
    ) -> None:
        self.weight, self.bias, self.format = weight, bias, form
        self.in_features = weight.shape[1]
        self.parts = parts  # outputs by checkpoint name, in order
        self._packed: PackedWeights | None = None
        self._scales: torch.Tensor | None = None  # [out_features, 1], of fp8
        self._groups: ArrangedWeights | None = None
        self._copy: ArrangedWeights | None = None

    @property
    def name(self) -> str:
        return next(iter(self.parts), "model.embed_tokens.weight")

    def check_size(self, form: MatrixFormat, setting: str) -> None:
        """Raise `ConfigError` if a setting's format does not support the matrix's size."""
        rows, columns = self.weight.shape
        fits, needed = rows % FP8_MULTIPLE == columns % FP8_MULTIPLE == 0, str(FP8_MULTIPLE)
        if isinstance(form, GroupFormat):
            fits, needed = columns % form.group_size == 0, f"{form.group_size} columns"
        if not fits:
            raise ConfigError(
                f"{setting}: {self.name} is in a matrix of {rows} x {columns}, and its format needs multiples of "
                f"{needed}; set {setting} to none"
            )

    @property
    def weight_bytes(self) -> int:
        if isinstance(self.format, GroupFormat):
            return self.format.num_bytes(self.weight.numel())
        if self.format == "fp8":
            return self.weight.numel() * FP8.itemsize + self.weight.shape[0] * torch.float32.itemsize
        return self.weight.nbytes

    def fill(self, parts: Sequence[torch.Tensor | GroupedWeights]) -> None:
        """Hold the matrices [outputs, in_features] of `parts` in the layer's format."""
        if isinstance(self.format, GroupFormat):
            joined = join_outputs([self._grouped(part, self.format) for part in parts])
            self._groups = arrange(joined, self.weight.dtype, rounds_inputs=self.format.rounds_inputs)
        else:
            floats = [dequantize(part) if isinstance(part, GroupedWeights) else part for part in parts]
            self.weight, self._scales = quantize_rows(torch.cat(floats).to(self.weight.dtype))

    def add_copy(self, form: GroupFormat) -> None:
        """Make a quantised copy of loaded weights, before `pack`."""
        self._copy = arrange(self._grouped(self.weight, form), self.weight.dtype)

    def _grouped(self, part: torch.Tensor | GroupedWeights, wanted: GroupFormat) -> GroupedWeights:
        """Round a matrix, unless its codes have as few bits already. Raise `ConfigError`."""
        if isinstance(part, GroupedWeights):
            if part.bits <= wanted.bits:
                return part
            part = dequantize(part)
        try:
            return quantize_groups(part, wanted.bits, wanted.group_size)
        except ValueError as error:
            raise ConfigError(
                f"{self.name}, or a matrix held with it, cannot be rounded: {error}; set quantization and "
                "pressure_quantization to none"
            ) from None

    def use_copy(self, is_used: bool) -> None:
        self._groups = self._copy if is_used else None

    def pack(self) -> None:
        if self.format is None and self.weight.device.type == "cpu" and can_pack(self.weight.dtype):
            self._packed = PackedWeights(self.weight)
            self.weight = torch.empty(0, dtype=self.weight.dtype)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the weights [num_indices, in_features] of some outputs."""
        if self._groups is None:
            return embedding(indices, self.weight)
        return grouped_embedding(indices, self._groups, self.weight.dtype)

    def __call__(self, x: torch.Tensor, lora: LoraGroups | None = None) -> torch.Tensor:
        """Return the products [T, out_features], with those of the tokens' adapters in `lora`."""
        products = self._products(x)
        if lora is not None and self.lora is not None:
            add_lora(products, x, self.lora, lora)
        return products

    def _products(self, x: torch.Tensor) -> torch.Tensor:
        if self._groups is not None:
            return grouped_linear(x, self._groups, self.bias)
        if self._scales is not None:
            return scaled_linear(x, self.weight, self._scales, self.bias)
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        return linear(x, self.weight, self.bias)

    def kernel_weights(self) -> LinearWeights | None:
        weights = self._groups or self._packed
        return LinearWeights(weights, self.bias) if isinstance(weights, PackedWeights | LaneWeights) else None


class InvariantLinear(Linear):
    """Linear layer whose result for a row is bitwise the same in any batch."""

    def pack(self) -> None:
        pass

    def _products(self, x: torch.Tensor) -> torch.Tensor:
        return invariant_linear(x, self.weight, self.bias)


class RowParallelLinear(Linear):
    """Linear layer of a rank's part of the inputs. It sums its products over all ranks; rank 0 adds the bias."""

    def __call__(self, x: torch.Tensor, lora: LoraGroups | None = None) -> torch.Tensor:
        products = super().__call__(x, lora)
        self.shard.collectives.all_reduce(products)
        return products

    def kernel_weights(self) -> None:
        """Return None: a C call of all layers cannot stop for a sum."""


class VocabParallelLinear(Linear):
    """Embedding table or output matrix of a rank's part of the vocabulary. Rows are of all, logits of the part."""

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        num_tokens = self.weight.shape[0]
        local = indices - self.shard.rank * num_tokens
        is_absent = (local < 0) | (local >= num_tokens)
        found = super().rows(local.clamp_(0, num_tokens - 1)).masked_fill_(is_absent.unsqueeze(1), 0)
        self.shard.collectives.all_reduce(found)
        return found


_SPLIT_LAYERS: Mapping[Split, type[Linear]] = {"inputs": RowParallelLinear, "vocabulary": VocabParallelLinear}


class Weights:
    """Empty weights of a model: tensors to copy to, by checkpoint name, and layers to fill."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, format_of: FormatChoice, *, is_invariant: bool = False,
        shard: Shard | None = None,
    ) -> None:  # fmt: skip
        self.dtype, self.device, self._format_of, self.is_invariant = dtype, device, format_of, is_invariant
        self.shard = shard or Shard()
        self.by_name: dict[str, torch.Tensor] = {}  # parts of a fused matrix are views
        self.tensor_parts: dict[str, TensorPart] = {}  # that this rank holds of checkpoint tensors; others whole
        self.linears: list[Linear] = []

    def tensor(self, name: str, *shape: int, part: str = "weight") -> torch.Tensor:
        self.by_name[f"{name}.{part}"] = tensor = self._empty(*shape)
        return tensor

    def table(self, name: str, num_rows: int, width: int) -> Linear:
        """Return an embedding table, of which only `rows` are read."""
        if self._format_of([f"{name}.weight"]) is None:
            num_rows = self._split([f"{name}.weight"], 0, num_rows)
            return self._make(self.tensor(name, num_rows, width), None, None, {}, "vocabulary")
        return self.linear("", width, {name: num_rows}, split="vocabulary")

    def linear(
        self, prefix: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, unbiased: str = "",
        split: Split = "none", unit: int = 1,
    ) -> Linear:  # fmt: skip
        """With `bias`, the part `unbiased` has none in the checkpoint. `unit`: outputs that stay on one rank."""
        if split == "inputs":
            in_features = self._split([f"{prefix}{name}.weight" for name in parts], 1, in_features)
        elif split != "none":
            kinds = ("weight", "bias") if bias else ("weight",)
            parts = {
                name: self._split([f"{prefix}{name}.{kind}" for kind in kinds], 0, count, unit)
                for name, count in parts.items()
            }
        biases = self._fused({f"{prefix}{name}.bias": count for name, count in parts.items()}) if bias else None
        if unbiased:
            self.by_name.pop(f"{prefix}{unbiased}.bias").zero_()
        names = {f"{prefix}{name}.weight": count for name, count in parts.items()}
        form = self._format_of(list(names))
        if form is None:
            return self.layer(self._fused(names, in_features), biases, None, names, split)
        weights = torch.empty(sum(parts.values()), in_features, dtype=self.dtype, device="meta")
        return self.layer(weights, biases, form, names, split)

    def layer(
        self, weight: torch.Tensor, bias: torch.Tensor | None, form: MatrixFormat, parts: Mapping[str, int],
        split: Split = "none",
    ) -> Linear:  # fmt: skip
        self.linears.append(self._make(weight, bias, form, parts, split))
        return self.linears[-1]

    def _make(
        self, weight: torch.Tensor, bias: torch.Tensor | None, form: MatrixFormat, parts: Mapping[str, int],
        split: Split,
    ) -> Linear:  # fmt: skip
        kind = InvariantLinear if self.is_invariant else Linear
        if self.shard.num_ranks > 1:
            kind = _SPLIT_LAYERS.get(split, kind)
            bias = None if split == "inputs" and self.shard.rank else bias
        layer = kind(weight, bias, form, parts)
        layer.shard = self.shard
        return layer

    def _split(self, names: Sequence[str], axis: int, total: int, unit: int = 1) -> int:
        """Record this rank's part of some tensors, and return its number of outputs or inputs."""
        if self.shard.num_ranks == 1:
            return total
        part = self.shard.part(axis, total, unit)
        self.tensor_parts |= dict.fromkeys(names, part)
        return part.end - part.begin

    def _fused(self, names: Mapping[str, int], *inputs: int) -> torch.Tensor:
        """Return a tensor [sum of outputs, *inputs] with named views."""
        fused = self._empty(sum(names.values()), *inputs)
        self.by_name |= zip(names, torch.split(fused, list(names.values())), strict=True)
        return fused

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        plain = {name: tuple(tensor.shape) for name, tensor in self.by_name.items()}
        return plain | {
            name: (rows, layer.weight.shape[1]) for layer in self.linears for name, rows in layer.parts.items()
        }
