"""Safetensors files, validated and read in chunks (https://huggingface.co/docs/safetensors).

Layout: 8 bytes little endian length n, n bytes of JSON header, data. Byte ranges of the header tile the data exactly.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from tidewheel.errors import ConfigError
from tidewheel.regular_files import open_regular

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class HeaderError(ValueError):
    pass


class TensorEntry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the data
    end: int


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                header = file.read(8)
                self.data_start = 8 + _header_size(header, size)  # bytes
                header = file.read(self.data_start - 8)
            self.entries = parse_header(header, size - self.data_start)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except HeaderError as error:
            raise ConfigError(f"{path} is not a valid safetensors file: {error}; download it again") from None

    @property
    def num_elements(self) -> int:
        return sum(math.prod(entry.shape) for entry in self.entries.values())


def _header_size(prefix: bytes, file_size: int) -> int:
    if len(prefix) < 8:
        raise HeaderError(f"it has {len(prefix)} bytes, fewer than the length of a header")
    size = int.from_bytes(prefix, "little")
    if size > MAX_HEADER_BYTES:
        raise HeaderError(f"its header claims {size} bytes, at most {MAX_HEADER_BYTES} are allowed")
    if size > file_size - 8:
        raise HeaderError(f"its header claims {size} bytes, the file has {file_size - 8} after the length")
    return size


def parse_header(header: bytes, data_size: int) -> dict[str, TensorEntry]:
    try:
        value = json.loads(header.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"its header is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise HeaderError("its header is not a JSON object")
    value.pop("__metadata__", None)
    entries = [(name, _parse_entry(name, entry)) for name, entry in value.items()]
    entries.sort(key=lambda item: (item[1].begin, item[1].end))
    _check_tiling(entries, data_size)
    return dict(entries)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise HeaderError("its header names something twice")
    return result


def _parse_entry(name: str, entry: object) -> TensorEntry:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"{name!r} must have dtype, shape and data_offsets")
    dtype_name = entry["dtype"]
    dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise HeaderError(f"{name!r} has dtype {dtype_name!r}, known are {', '.join(_DTYPES)}")
    shape = _sizes(name, "shape", entry["shape"])
    if len(shape) > MAX_DIMENSIONS:
        raise HeaderError(f"{name!r} has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are allowed")
    offsets = _sizes(name, "data_offsets", entry["data_offsets"])
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise HeaderError(f"{name!r} of shape {list(shape)} and {dtype_name} has data_offsets {list(offsets)}")
    return TensorEntry(dtype, shape, *offsets)


def _sizes(name: str, key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**63 for item in value):
        raise HeaderError(f"{name!r} has {key} {str(value)[:80]}")
    return tuple(value)


def _check_tiling(entries: list[tuple[str, TensorEntry]], data_size: int) -> None:
    position = 0
    for name, entry in entries:
        if entry.begin != position:
            problem = "overlaps what is before it" if entry.begin < position else "leaves a hole before it"
            raise HeaderError(f"the data of {name!r} {problem}")
        position = entry.end
    if position != data_size:
        raise HeaderError(f"its tensors need {position} bytes of data, the file has {data_size}")


class TensorFile(Protocol):
    path: Path
    data_start: int  # bytes
    entries: dict[str, TensorEntry]


class FileChunk(NamedTuple):
    file: TensorFile
    begin: int  # bytes from the start of the data
    dtype: torch.dtype  # in the file
    destination: torch.Tensor  # flat view [n]

    @property
    def size(self) -> int:
        return self.destination.numel() * self.dtype.itemsize

    @property
    def is_converted(self) -> bool:
        return self.dtype != self.destination.dtype


def plan_chunks(
    files: Iterable[TensorFile], destinations: Mapping[str, torch.Tensor], max_bytes: int
) -> list[FileChunk]:
    chunks: list[FileChunk] = []
    for file in files:
        for name, entry in file.entries.items():
            begin = entry.begin
            if name in destinations and begin < entry.end:
                for piece in torch.split(destinations[name].view(-1), max_bytes // entry.dtype.itemsize):
                    chunks.append(FileChunk(file, begin, entry.dtype, piece))
                    begin += chunks[-1].size
    return chunks
