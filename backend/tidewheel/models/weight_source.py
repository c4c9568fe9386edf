"""Sources of weights, by Hugging Face's names."""

import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tidewheel.config import Quantization
from tidewheel.errors import ConfigError
from tidewheel.model_formats import MAX_CONFIG_BYTES
from tidewheel.models.linear import FormatChoice, GroupFormat, MatrixFormat
from tidewheel.models.model_folder import gguf_by_name
from tidewheel.models.shard import TensorPart
from tidewheel.models.weight_stream import BytesRead, StoredTensor, copy_tensors
from tidewheel.regular_files import as_config_error, open_regular, read_object
from tidewheel_kernels.grouped_linear import GroupedWeights

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
OUTER_MATRICES = ("model.embed_tokens.weight", "lm_head.weight", "model.decoder.embed_tokens.weight")
RANDOM_STD = 0.02
NUM_NAMED = 3
MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip

ROUNDED: Mapping[str, GroupFormat] = {"int8": GroupFormat(8), "int4": GroupFormat(4, has_minimums=True)}


def uncounted(_num_bytes: int) -> None:
    pass


class WeightSource:
    tensors: Mapping[str, StoredTensor]

    def take_parts(self, parts: Mapping[str, TensorPart]) -> None:
        """From now on load these parts of tensors, others whole. Raise `ConfigError` if one cannot be split."""
        self.tensors = {name: stored._replace(part=parts.get(name)) for name, stored in self.tensors.items()}

    def copy(self, destinations: Mapping[str, torch.Tensor], read: BytesRead) -> None:
        """Copy each tensor to its contiguous destination, converted to its dtype. Raise `ConfigError`."""
        copy_tensors(self.tensors, destinations, read)

    def plain(self, name: str, device: torch.device) -> torch.Tensor:
        stored = self.tensors[name]
        assert isinstance(stored.kind, torch.dtype)
        tensor = torch.empty(stored.part_shape, dtype=stored.kind, device=device)
        self.copy({name: tensor}, uncounted)
        return tensor

    def matrix(self, name: str, device: torch.device) -> torch.Tensor | GroupedWeights:
        """Return a matrix [out_features, in_features] as it is stored. Raise `ConfigError`."""
        return self.plain(name, device)


class SafetensorsFolder(WeightSource):
    def __init__(self, folder: Path) -> None:
        tensors: dict[str, StoredTensor] = {}
        for path in _checkpoint_paths(folder):
            for name, stored in read_tensors(path).items():
                if name in tensors:
                    raise ConfigError(f"{folder}: {name} is in more than one file")
                tensors[name] = stored
        self.tensors = tensors


class RandomWeights(WeightSource):
    """Random weights, equal for equal names, parts, shapes, seed and device model."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int) -> None:
        self.tensors = {name: StoredTensor(Path(), shape, dtype) for name, shape in shapes.items()}
        self._seed = seed

    def copy(self, destinations: Mapping[str, torch.Tensor], read: BytesRead) -> None:
        generator = torch.Generator(next(iter(destinations.values())).device)
        for name, tensor in destinations.items():
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            else:
                part = self.tensors[name].part if name in self.tensors else None
                seed = self._seed ^ zlib.crc32((name if part is None else f"{name} {tuple(part)}").encode())
                tensor.normal_(0.0, RANDOM_STD, generator=generator.manual_seed(seed))
            read(tensor.nbytes)


def format_choice(wanted: Quantization, source: WeightSource | None = None) -> FormatChoice:
    """Return the choice of a layer's format; `source`: the checkpoint, if known."""

    def choose(names: Sequence[str]) -> MatrixFormat:
        is_outer = names[0] in OUTER_MATRICES
        match wanted:
            case "fp8":
                return None if is_outer else "fp8"
            case "int8" | "int4":
                return ROUNDED["int8" if is_outer else wanted]
            case "auto" if source is not None:
                return _joint_format([source.tensors[name].kind for name in names if name in source.tensors])
        return None

    return choose


def _joint_format(kinds: Sequence[torch.dtype | GroupFormat]) -> MatrixFormat:
    formats = [kind for kind in kinds if isinstance(kind, GroupFormat)]
    if not formats or len(formats) < len(kinds):
        return None
    return GroupFormat(
        max(form.bits for form in formats),
        min(form.group_size for form in formats),
        any(form.has_minimums for form in formats),
        all(form.rounds_inputs for form in formats),
    )


def check_names(
    source: WeightSource, shapes: Mapping[str, tuple[int, ...]], ignored: Callable[[str], bool], where: Path,
    by: str = "config.json",
) -> None:  # fmt: skip
    """Raise `ConfigError` for tensors that are missing, unknown, of another shape than `by` has, or no floats."""
    if missing := shapes.keys() - source.tensors.keys():
        raise ConfigError(f"{where}: the checkpoint lacks {named(missing)}; its files and {by} do not match")
    for name, wanted in shapes.items():
        file, shape, kind, *_ = source.tensors[name]
        if shape != wanted:
            raise ConfigError(f"{file}: {name} has shape {list(shape)}, {by} asks for {list(wanted)}")
        # Floats of 8 bits have scales.
        if isinstance(kind, torch.dtype) and not (kind.is_floating_point and kind.itemsize > 1):
            raise ConfigError(
                f"{file}: {name} has dtype {kind}; only float weights are served, and quantised ones that "
                "config.json describes"
            )
    if left_over := {name for name in source.tensors if name not in shapes and not ignored(name)}:
        raise ConfigError(f"{where}: the checkpoint has {named(left_over)}, which {by} has no place for")


def named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = len(ordered) - NUM_NAMED
    return ", ".join(ordered[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _checkpoint_paths(folder: Path) -> list[Path]:
    if os.path.lexists(folder / INDEX_NAME):  # its reader reports an unreadable one
        return _indexed_paths(folder)
    if os.path.lexists(folder / SINGLE_NAME):
        return [folder / SINGLE_NAME]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise ConfigError(f"{folder} has pickled weights only, which are never loaded: convert them to safetensors")
    raise ConfigError(
        f"{folder} has no weights: {SINGLE_NAME} and {INDEX_NAME} are both missing; {gguf_by_name('OWNER/NAME')}"
    )


def _indexed_paths(folder: Path) -> list[Path]:
    where = folder / INDEX_NAME
    weight_map = read_object(where, MAX_CONFIG_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{where} has no weight_map: download it again")
    paths = []
    for name in sorted({str(value) for value in weight_map.values()}):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ConfigError(f"{where} names {name!r}: only safetensors files beside it are read")
        if not os.path.lexists(folder / name):
            raise ConfigError(f"{folder / name} is missing, though {INDEX_NAME} names it: download it again")
        paths.append(folder / name)
    return paths


def read_tensors(path: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, in the order of their bytes, which they tile. Raise `ConfigError`."""
    tensors: dict[str, StoredTensor] = {}
    with as_config_error(f"{path} is not a valid safetensors file"), open_regular(path) as file:
        begin = int.from_bytes(file.read(8), "little") + 8
        if begin - 8 > max_header_bytes:
            raise ValueError(f"its header claims {begin - 8} bytes, and at most {max_header_bytes} are read")
        try:
            with safe_open(path, "numpy") as header:
                found = {name: header.get_slice(name) for name in header.offset_keys()}
        except SafetensorError as error:
            raise ValueError(error) from None
        for name, tensor in found.items():
            if (dtype := tensor.get_dtype()) not in _DTYPES:
                raise ValueError(f"{name!r} has dtype {dtype!r}, known are {', '.join(_DTYPES)}")
            tensors[name] = StoredTensor(path, tuple(tensor.get_shape()), _DTYPES[dtype], begin)
            begin += tensors[name].num_bytes
    return tensors
