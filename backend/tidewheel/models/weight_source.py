"""Sources of weights: what a checkpoint holds, by Hugging Face's names, and its matrices as they are stored."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from tidewheel.config import Quantization
from tidewheel.errors import ConfigError
from tidewheel.model_formats import MAX_CONFIG_BYTES
from tidewheel.models.linear import FormatChoice, GroupFormat, MatrixFormat
from tidewheel.models.safetensors_file import FileChunk, SafetensorsFile, plan_chunks
from tidewheel.models.weight_stream import SLOT_BYTES, sink_on, stream_chunks
from tidewheel.regular_files import read_object
from tidewheel_kernels.grouped_linear import GroupedWeights

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
OUTER_MATRICES = ("model.embed_tokens.weight", "lm_head.weight")
RANDOM_STD = 0.02
NUM_NAMED = 3

ROUNDED: Mapping[str, GroupFormat] = {"int8": GroupFormat(8), "int4": GroupFormat(4, has_minimums=True)}

BytesRead = Callable[[int], None]  # called with the bytes read since the last call


def uncounted(_num_bytes: int) -> None:
    pass


class StoredTensor(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    kind: torch.dtype | GroupFormat

    @property
    def num_bytes(self) -> int:
        size = math.prod(self.shape)
        return self.kind.num_bytes(size) if isinstance(self.kind, GroupFormat) else size * self.kind.itemsize


class WeightSource(Protocol):
    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def copy(self, destinations: Mapping[str, torch.Tensor], read: BytesRead) -> None:
        """Copy each tensor to its contiguous destination, converted to its dtype. Raise `ConfigError`."""

    def matrix(self, name: str, device: torch.device) -> torch.Tensor | GroupedWeights:
        """Return a matrix [out_features, in_features] as it is stored. Raise `ConfigError`."""


class SafetensorsFolder:
    """Weights of a folder of safetensors files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = [SafetensorsFile(path) for path in _checkpoint_paths(folder)]
        self.tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            for name, entry in file.entries.items():
                if name in self.tensors:
                    raise ConfigError(f"{folder}: {name} is in more than one file")
                self.tensors[name] = StoredTensor(file.path, entry.shape, entry.dtype)

    def copy(self, destinations: Mapping[str, torch.Tensor], read: BytesRead) -> None:
        def delivered(chunk: FileChunk) -> None:
            read(chunk.size)

        device = next(iter(destinations.values())).device
        stream_chunks(plan_chunks(self.files, destinations, SLOT_BYTES), sink_on(device), delivered)

    def matrix(self, name: str, device: torch.device) -> torch.Tensor:
        stored = self.tensors[name]
        assert isinstance(stored.kind, torch.dtype)
        matrix = torch.empty(stored.shape, dtype=stored.kind, device=device)
        self.copy({name: matrix}, uncounted)
        return matrix


class RandomWeights:
    """Random weights, equal for equal names, shapes, seed and device model."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int) -> None:
        self.tensors = {name: StoredTensor(Path(), shape, dtype) for name, shape in shapes.items()}
        self._dtype, self._seed = dtype, seed

    def copy(self, destinations: Mapping[str, torch.Tensor], read: BytesRead) -> None:
        generator = torch.Generator(next(iter(destinations.values())).device)
        for name, tensor in destinations.items():
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            else:
                seed = self._seed ^ zlib.crc32(name.encode())
                tensor.normal_(0.0, RANDOM_STD, generator=generator.manual_seed(seed))
            read(tensor.nbytes)

    def matrix(self, name: str, device: torch.device) -> torch.Tensor:
        matrix = torch.empty(self.tensors[name].shape, dtype=self._dtype, device=device)
        self.copy({name: matrix}, uncounted)
        return matrix


def format_choice(wanted: Quantization, source: WeightSource | None = None) -> FormatChoice:
    """Return the choice of a layer's format; `source` is the checkpoint, if it is known yet."""

    def choose(names: Sequence[str]) -> MatrixFormat:
        is_outer = names[0] in OUTER_MATRICES
        match wanted:
            case "fp8":
                return None if is_outer else "fp8"
            case "int8" | "int4":
                return ROUNDED["int8" if is_outer else wanted]
            case "auto" if source is not None:
                return _joined([source.tensors[name].kind for name in names if name in source.tensors])
        return None

    return choose


def _joined(kinds: Sequence[torch.dtype | GroupFormat]) -> MatrixFormat:
    formats = [kind for kind in kinds if isinstance(kind, GroupFormat)]
    if not formats or len(formats) < len(kinds):
        return None
    return GroupFormat(
        8 if any(form.bits == 8 for form in formats) else 4,
        min(form.group_size for form in formats),
        any(form.has_minimums for form in formats),
    )


def check_names(
    source: WeightSource, shapes: Mapping[str, tuple[int, ...]], ignored: Callable[[str], bool], where: Path
) -> None:
    """Raise `ConfigError` for a tensor that is missing, has another shape or no floats, or is unknown."""
    for name, stored in source.tensors.items():
        if name not in shapes:
            continue
        if stored.shape != shapes[name]:
            raise ConfigError(
                f"{stored.file}: {name} has shape {list(stored.shape)}, config.json asks for {list(shapes[name])}"
            )
        if isinstance(stored.kind, torch.dtype) and not _is_float(stored.kind):
            raise ConfigError(
                f"{stored.file}: {name} has dtype {stored.kind}; only float weights are served, and quantised "
                "ones that config.json describes"
            )
    missing = [name for name in shapes if name not in source.tensors]
    if missing:
        raise ConfigError(f"{where}: the checkpoint lacks {named(missing)}; its files and config.json do not match")
    left_over = [name for name in source.tensors if name not in shapes and not ignored(name)]
    if left_over:
        raise ConfigError(f"{where}: the checkpoint has {named(left_over)}, which config.json has no place for")


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1  # floats of 8 bits have scales


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
    raise ConfigError(f"{folder} has no weights: {SINGLE_NAME} and {INDEX_NAME} are both missing")


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
