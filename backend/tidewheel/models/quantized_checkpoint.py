"""Checkpoints quantised by AWQ, GPTQ, compressed-tensors or fp8.

Tensors decide which layers are quantised, not `modules_to_not_convert` or `ignore`. Stored scales of activations are
unused.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from tidewheel.errors import ConfigError
from tidewheel.model_formats import FLOAT_MODEL, MAX_CONFIG_BYTES, QUANTIZATION_KEYS, old_quantization
from tidewheel.models import quantized_layers as layers
from tidewheel.models.config_fields import MAX_SHOWN_CHARS, ConfigFields
from tidewheel.models.quantized_layers import GROUP_SIZES, ROUNDED, Layout, MatrixSize, TensorForm, Tensors
from tidewheel.models.shard import TensorPart
from tidewheel.models.weight_source import SafetensorsFolder, WeightSource
from tidewheel.models.weight_stream import BytesRead, StoredTensor
from tidewheel.regular_files import as_config_error, read_object
from tidewheel_kernels.grouped_linear import GroupedWeights, dequantize, quantize_groups
from tidewheel_kernels.grouped_linear.reference import Bits

CPU = torch.device("cpu")
T = TypeVar("T")
BITS: tuple[Bits, ...] = (4, 8)
# The last three leave the groups successive.
ORDERS: tuple[str | bool, ...] = ("group", "dynamic", True, "weight", "static", False)
KINDS = {
    "pack-quantized": ("int",), "int-quantized": ("int", "float"), "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}  # fmt: skip
ACTIVATION_TENSORS = (".input_scale", ".input_zero_point", ".input_scale_ub", ".activation_scale")
ALIASES: Mapping[str, tuple[str, ...]] = {"weight_scale": ("weight_scale_inv",)}  # both are factors


def quantization_layout(folder: Path, fields: ConfigFields) -> Layout | None:
    """Return the layout that a checkpoint declares, or None. Raise `ConfigError`."""
    for key, method in QUANTIZATION_KEYS.items():
        if fields.values.get(key):
            return _layout(fields.section(key), method)
    if (old := old_quantization(folder)) is None:
        return None
    path, default = old
    return _layout(ConfigFields(read_object(path, MAX_CONFIG_BYTES), str(path)), default)


def _layout(section: ConfigFields, method: str | None) -> Layout:
    return PARSERS[_one_of(section, "quant_method", tuple(PARSERS), method)](section)


def _one_of(section: ConfigFields, key: str, accepted: Sequence[T], default: T | None = None) -> T:
    value = default if section.values.get(key) is None else section.values[key]
    known = value.lower() if isinstance(value, str) else value
    for choice in accepted:
        if choice == known:
            return choice
    raise _refusal(section, key, f"only {' or '.join(map(str, accepted))} is served")


def _refusal(section: ConfigFields, key: str, cause: str) -> ConfigError:
    said = f"is {repr(section.values[key])[:MAX_SHOWN_CHARS]}" if key in section.values else "is missing"
    return ConfigError(f"{section.where}: {key} {said}, and {cause}: {FLOAT_MODEL}")


def _refuse_set(section: ConfigFields, *keys: str) -> None:
    for key in keys:
        if section.values.get(key):
            raise _refusal(section, key, "this is not served")


def _group_size(section: ConfigFields, key: str) -> int:
    """Return the inputs of a group, 0 for a whole row (-1 in files)."""
    return 0 if section.values.get(key) == -1 else section.integer(key)


def _awq(section: ConfigFields) -> Layout:
    is_old = "w_bit" in section.values
    _one_of(section, "version" if "version" in section.values else "format", ("gemm",), "gemm")
    bits = _one_of(section, "w_bit" if is_old else "bits", BITS[:1])
    return layers.AwqLayout(bits, _group_size(section, "q_group_size" if is_old else "group_size"), needs_order=False)


def _gptq(section: ConfigFields) -> Layout:
    _refuse_set(section, "is_marlin_format")
    _one_of(section, "pack_dtype", ("int32",), "int32")
    if not all(name.startswith("-:") for name in section.section("dynamic").values):  # modules left out
        raise _refusal(section, "dynamic", "only one scheme for all quantised layers is served")
    key = "checkpoint_format" if "checkpoint_format" in section.values else "format"
    version = _one_of(section, key, ("gptq", "gptq_v2"), "gptq")
    bits, group_size = _one_of(section, "bits", BITS), _group_size(section, "group_size")
    return layers.GptqLayout(bits, group_size, section.flag("desc_act", False), version == "gptq")


def _block(section: ConfigFields, key: str) -> tuple[int, int] | None:
    match section.values.get(key):
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise section.error(key, "two sizes, such as [128, 128]")


def _compressed(section: ConfigFields) -> Layout:
    _refuse_set(section, "kv_cache_scheme", "transform_config")
    sparsity = section.section("sparsity_config")
    if sparsity.values:
        _one_of(sparsity, "format", ("dense",))
    stored = _one_of(section, "format", tuple(KINDS))
    groups = section.section("config_groups")
    schemes = [groups.section(name) for name in groups.values]
    for scheme in schemes:
        _refuse_set(scheme, "output_activations")
    layouts = [_of_scheme(scheme.section("weights"), stored) for scheme in schemes]
    if not layouts or any(layout != layouts[0] for layout in layouts):
        raise _refusal(section, "config_groups", "one scheme for all quantised layers is needed")
    layout = layouts[0]
    if isinstance(layout, layers.CompressedLayout):
        return replace(layout, rounds_inputs=all(_rounds_inputs(scheme) for scheme in schemes))
    return layout


def _rounds_inputs(scheme: ConfigFields) -> bool:
    """Return whether activations are int8 with a scale for each token."""
    found = {"num_bits": 8, "type": "int", "symmetric": True, **scheme.section("input_activations").values}
    wanted = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    return found.items() >= wanted.items()


def _of_scheme(weights: ConfigFields, stored: str) -> Layout:
    _refuse_set(weights, "dynamic")
    if _one_of(weights, "type", KINDS[stored], "int") == "float":
        _one_of(weights, "num_bits", (8,))
        strategy = _one_of(weights, "strategy", ("tensor", "channel", "block"))
        return layers.Fp8Layout(_block(weights, "block_structure") if strategy == "block" else None)
    bits = _one_of(weights, "num_bits", BITS)
    strategy = _one_of(weights, "strategy", ("tensor", "channel", "group"))
    group_size = weights.integer("group_size") if strategy == "group" else 0
    needs_order = _one_of(weights, "actorder", ORDERS, False) in ORDERS[:3]
    if stored == "pack-quantized":
        return layers.PackedLayout(bits, group_size, needs_order, weights.flag("symmetric", True))
    return layers.CompressedLayout(8, group_size, needs_order, weights.flag("symmetric", True))


PARSERS: dict[str, Callable[[ConfigFields], Layout]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": lambda section: layers.Fp8Layout(_block(section, "weight_block_size")),
    "fbgemm_fp8": lambda _: layers.Fp8Layout(None),
}


class QuantizedFolder(WeightSource):
    """Safetensors, with each quantised layer as one matrix, `X.weight`."""

    def __init__(self, folder: SafetensorsFolder, layout: Layout, expected: Collection[str]) -> None:
        """Check layers, and drop biases of zeros (old writers of GPTQ) unless `expected`. Raise `ConfigError`."""
        self._folder, self._layout = folder, layout
        self._layers: dict[str, dict[str, str]] = {}  # of a matrix: name by part
        self.tensors: dict[str, StoredTensor] = {
            name: stored for name, stored in folder.tensors.items() if not name.endswith(ACTIVATION_TENSORS)
        }
        for main in [name for name in self.tensors if self._is_main(name)]:
            with self._as_config_error(main):
                self._add(main)
            bias = f"{main.removesuffix(layout.main)}bias"
            if bias in self.tensors and bias not in expected and not folder.plain(bias, CPU).float().any():
                del self.tensors[bias]

    def take_parts(self, parts: Mapping[str, TensorPart]) -> None:
        for name in parts.keys() & self._layers:
            file, method = self.tensors[name].file, type(self._layout).__name__.removesuffix("Layout")
            raise ConfigError(
                f"{file}: {name} is stored as {method} codes, which are not split between ranks: set "
                f"tensor_parallel_size to 1, or {FLOAT_MODEL}"
            )
        super().take_parts(parts)

    def copy(self, destinations: Mapping[str, torch.Tensor], read: BytesRead) -> None:
        super().copy({name: tensor for name, tensor in destinations.items() if name not in self._layers}, read)
        for name in destinations.keys() & self._layers:
            matrix = self._stored(name, destinations[name].device)
            destinations[name].copy_(dequantize(matrix) if isinstance(matrix, GroupedWeights) else matrix)
            read(self.tensors[name].num_bytes)

    def matrix(self, name: str, device: torch.device) -> torch.Tensor | GroupedWeights:
        if name not in self._layers:
            return self.plain(name, device)
        matrix = self._stored(name, device)
        with self._as_config_error(self._layers[name][self._layout.main]):
            return matrix if isinstance(matrix, GroupedWeights) else quantize_groups(matrix, ROUNDED.bits)

    def _stored(self, name: str, device: torch.device) -> torch.Tensor | GroupedWeights:
        return self._layout.matrix(self._read(self._layers[name], device), MatrixSize(*self.tensors[name].shape))

    def _read(self, names: Mapping[str, str], device: torch.device) -> Tensors:
        return {part: self._folder.plain(name, device) for part, name in names.items()}

    def _is_main(self, name: str) -> bool:
        is_float = name.endswith(".weight") and self.tensors[name].kind not in self._layout.main_dtypes
        return name.endswith(f".{self._layout.main}") and not is_float

    def _add(self, main: str) -> None:
        """Replace the tensors of a layer by its matrix. Raise `ValueError`."""
        layout, prefix = self._layout, main.removesuffix(self._layout.main)
        stored = self.tensors[main]
        if len(stored.shape) != 2 or not all(stored.shape) or stored.kind not in layout.main_dtypes:
            raise ValueError(f"it has shape {list(stored.shape)} and dtype {stored.kind}")
        size, multiple = layout.size(*stored.shape), GROUP_SIZES[-1]
        if size.in_features % multiple:
            raise ValueError(f"the matrix has {size.in_features} inputs, and only multiples of {multiple} are served")
        found = {part: self._name(prefix, part, form) for part, form in layout.forms(size).items()}
        names = {part: name for part, name in found.items() if name}
        form = layout.format(self._read(names, CPU), size)
        names[layout.main] = main
        for name in names.values():
            del self.tensors[name]
        if (matrix := f"{prefix}weight") in self.tensors:
            raise ValueError(f"{matrix} is beside it")
        self._layers[matrix] = names
        self.tensors[matrix] = StoredTensor(stored.file, size, form)

    def _name(self, prefix: str, part: str, form: TensorForm) -> str:
        """Return a checked tensor's name, empty if absent and not required."""
        found = [prefix + each for each in (part, *ALIASES.get(part, ())) if prefix + each in self.tensors]
        if len(found) > 1:
            raise ValueError(f"{' and '.join(found)} are beside it")
        if not found and form.is_required:
            raise ValueError(f"{part} is missing beside it")
        for name in found:
            _, shape, kind, *_ = self.tensors[name]
            if shape not in form.shapes or kind not in form.dtypes:
                shapes, dtypes = (" or ".join(map(str, each)) for each in (map(list, form.shapes), form.dtypes))
                raise ValueError(f"{part} is {list(shape)} {kind}, it must be {shapes} in {dtypes}")
        return "".join(found)

    def _as_config_error(self, name: str) -> AbstractContextManager[None]:
        what = f"{self._folder.tensors[name].file}: {name}"
        return as_config_error(what, f"download the model again, or {FLOAT_MODEL}")
