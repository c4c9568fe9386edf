"""GGUF headers: read like the library's reader, and refused in one line whatever they claim."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from support.models.gguf_files import F32, blocks, write_gguf
from tidewheel.errors import ConfigError
from tidewheel.models.gguf_header import read_header

Q8_0 = gguf.GGMLQuantizationType.Q8_0
METADATA = {
    "general.architecture": "llama", "a.flag": True, "a.number": 7, "a.float": 0.5, "a.text": "ä",
    "a.texts": ["b", ""],    "a.numbers": [3, 4, 5], "a.floats": [0.25, 0.5],
}  # fmt: skip
TENSORS = {"x": (np.arange(6, dtype=np.float32).reshape(2, 3), F32), "y": (blocks(Q8_0, 4, 64), Q8_0)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "a.gguf", METADATA, TENSORS)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_header(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("alignment", [0, 64])
def test_metadata_and_tensors_are_those_of_the_library(tmp_path: Path, alignment: int) -> None:
    path = write_gguf(tmp_path / "a.gguf", METADATA, TENSORS, alignment)
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert METADATA.items() <= header.metadata.items()
    assert header.metadata == {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    for tensor in reader.tensors:
        found = header.tensors[tensor.name]
        assert (found.kind, list(found.shape[::-1])) == (tensor.tensor_type, tensor.shape.tolist())
        assert (found.begin, found.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_every_truncation_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    last = read_header(file).tensors["y"]
    for length in range(last.begin + last.num_bytes):
        file.write_bytes(whole[:length])
        assert "download it again" in refusal(file)


def test_every_changed_byte_of_the_header_ends_in_a_refusal_or_a_header(file: Path) -> None:
    whole, start = file.read_bytes(), read_header(file).tensors["x"].begin
    for position in range(start):
        for value in (0, 0xFF, whole[position] ^ 1):
            file.write_bytes(whole[:position] + bytes((value,)) + whole[position + 1 :])
            try:
                read_header(file)
            except ConfigError as error:
                assert "\n" not in str(error)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(
    num_tensors: int = 0, num_keys: int = 0, rest: bytes = b"", *, magic: bytes = b"GGUF", version: int = 3
) -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def tensor(kind: int, *shape: int, begin: int = 0, dimensions: int | None = None) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return text("x") + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, begin) + bytes(64)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "claims 8 bytes where 0 are left"),
    "magic": (header(magic=b"GGML"), "begins with b'GGML' instead of GGUF; download"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS; run git lfs pull"),
    "version": (header(version=1), "has version 1, read are 2 and 3"),
    "big-endian": (header(version=3 << 24), "read are 2 and 3 of little-endian files"),
    "keys": (header(num_keys=2**60), f"claims {2**60} items"),
    "tensors": (header(num_tensors=2**60), f"claims {2**60} items"),
    "text": (header(num_keys=1, rest=struct.pack("<Q", 2**60) + bytes(9)), f"claims {2**60} bytes"),
    "text of the largest size": (header(num_keys=1, rest=b"\xff" * 20), f"claims {2**64 - 1} bytes"),
    "list": (header(num_keys=1, rest=text("k") + struct.pack("<IIQ", 9, 4, 2**60)), f"claims {2**60} items"),
    "list of texts": (header(num_keys=1, rest=text("k") + struct.pack("<IIQ", 9, 8, 2**60)), f"claims {2**60} items"),
    "list of lists": (header(num_keys=1, rest=text("k") + struct.pack("<IIQ", 9, 9, 1)), "'k' has values of type 9"),
    "kind of value": (header(num_keys=1, rest=text("k") + struct.pack("<I", 99)), "'k' has values of type 99"),
    "not UTF-8": (header(num_keys=1, rest=struct.pack("<Q", 1) + b"\xff" + bytes(8)), "'utf-8' codec"),
    "key twice": (header(num_keys=2, rest=(text("k") + struct.pack("<IB", 7, 1)) * 2), "twice"),
    "tensor twice": (header(num_tensors=2, rest=tensor(0, 4)[:-64] * 2), "twice"),
    "alignment": (header(num_keys=1, rest=text("general.alignment") + struct.pack("<II", 4, 0)), "alignment is 0"),
    "kind of tensor": (header(num_tensors=1, rest=tensor(999, 32)), "'x' has values of type 999, which gguf does"),
    "dimensions": (header(num_tensors=1, rest=tensor(0, 4, dimensions=2**31)), "'x' of type"),
    "no dimensions": (header(num_tensors=1, rest=tensor(0)), "has shape []"),
    "empty dimension": (header(num_tensors=1, rest=tensor(0, 4, 0)), "has shape [0, 4]"),
    "part of a block": (header(num_tensors=1, rest=tensor(8, 33)), "has shape [33]"),
    "product of 2**120": (header(num_tensors=1, rest=tensor(0, 2**60, 2**60)), "it lacks"),
    "offset": (header(num_tensors=1, rest=tensor(0, 4, begin=32)), "begins at byte 32 instead of 0"),
    "offset out of the file": (header(num_tensors=1, rest=tensor(0, 4, begin=2**63)), f"begins at byte {2**63}"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(tmp_path: Path, name: str) -> None:
    data, words = HOSTILE[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    assert words in refusal(path)


@pytest.mark.parametrize(
    "make",
    [lambda path: path.mkdir(), lambda path: None, lambda path: path.symlink_to(path)],
    ids=["folder", "none", "loop"],
)
def test_a_path_that_cannot_be_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a.gguf")
    assert "cannot be read" in refusal(tmp_path / "a.gguf")
