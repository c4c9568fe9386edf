"""Files of safetensors: what the format allows is read, everything else is refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tidewheel.errors import ConfigError
from tidewheel.models.weight_source import MAX_HEADER_BYTES, read_tensors
from tidewheel.models.weight_stream import copy_tensors


def entry(begin: int, end: int, **changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end], **changes}


def header(**entries: object) -> bytes:
    return json.dumps(entries).encode()


def write(path: Path, head: bytes, data: bytes) -> Path:
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    return path


def read_all(path: Path) -> dict[str, torch.Tensor]:
    stored = read_tensors(path)
    tensors = {name: torch.empty(item.shape, dtype=item.kind) for name, item in stored.items()}
    copy_tensors(stored, tensors, lambda num_bytes: None)
    return tensors


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "float": torch.randn(3, 5),
        "half": torch.randn(4).half(),
        "brain": torch.randn(2, 2, 2).bfloat16(),
        "flags": torch.tensor([True, False]),
        "numbers": torch.arange(7),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    read = read_all(tmp_path / "a.safetensors")
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


@pytest.mark.parametrize(
    ("head", "data_size"),
    [
        (b"[]", 0),
        (b"{", 0),
        (b"\xff\xfe", 0),
        (b"[" * 100_000, 0),
        (b'{"a": 1}', 0),
        (header(a={"dtype": "F32", "shape": [1]}), 4),
        (header(a=entry(0, 4, dtype="F8_E5M2", shape=[4])), 4),
        (header(a=entry(0, 4, dtype=["F32"])), 4),
        (header(a=entry(0, 4, shape=[-1])), 4),
        (header(a=entry(0, 4, shape=[2**63])), 4),
        (header(a=entry(0, 4, shape=[True])), 4),
        (header(a=entry(0, 4, shape="1")), 4),
        (header(a=entry(0, 4, shape=[2**40, 2**40])), 4),
        (header(a=entry(0, 4, data_offsets=[0, 4, 8])), 4),
        (header(a=entry(0, 4, data_offsets=[4, 0])), 4),
        (header(a=entry(0, 8), b=entry(4, 12)), 12),
        (header(a=entry(0, 4), b=entry(8, 12)), 12),
        (header(a=entry(4, 8)), 8),
        (header(a=entry(0, 8)), 4),
        (header(a=entry(0, 4)), 8),
    ],
)
def test_bad_headers_are_refused(tmp_path: Path, head: bytes, data_size: int) -> None:
    path = write(tmp_path / "bad.safetensors", head, bytes(data_size))
    assert "bad.safetensors is not a valid safetensors file: " in refusal(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
    ],
)
def test_bad_lengths_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    assert "bad.safetensors is not a valid safetensors file: " in refusal(path)


def test_a_header_beyond_the_limit_is_not_parsed(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.safetensors", header(a=entry(0, 4)), bytes(4))
    with pytest.raises(ConfigError, match=r"header claims .* bytes, and at most 10 are read"):
        read_tensors(path, 10)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_tensors(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_random_bytes_never_get_past_the_parser(tmp_path: Path) -> None:
    chance, path = random.Random(0), tmp_path / "random.safetensors"
    for _ in range(200):
        data_size = chance.randrange(64)
        write(path, chance.randbytes(chance.randrange(200)), bytes(data_size))
        try:
            tensors = read_tensors(path)
        except ConfigError:
            continue
        assert sum(tensor.num_bytes for tensor in tensors.values()) == data_size


def test_mutated_files_are_refused_or_read_within_bounds(tmp_path: Path) -> None:
    save_file({"a": torch.randn(4, 4), "b": torch.randn(8).half()}, tmp_path / "good.safetensors")
    good = (tmp_path / "good.safetensors").read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged) - 80)] = chance.randrange(256)
        path = tmp_path / "bad.safetensors"
        path.write_bytes(damaged[: chance.choice((len(damaged), chance.randrange(len(damaged))))])
        try:
            tensors = read_all(path)
        except ConfigError:
            refused += 1
        else:
            assert sum(tensor.nbytes for tensor in tensors.values()) == 80
    assert refused > 200
