"""GGUF files of values as JSON has them."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT

MAX_TENSOR_BYTES = 1 << 16  # larger ones have no data
ONE = struct.pack("<f", 1.0)  # and halves are 0 or 1.875


def gguf_bytes(metadata: Mapping[str, object], tensors: Mapping[str, object]) -> bytes:
    """Return a file; a tensor is ``[type, shape]``. Leave out what the format cannot hold."""
    pairs = [_text(key) + encoded for key, value in metadata.items() if (encoded := _value(value))]
    entries, data = [], b""
    for name, tensor in tensors.items():
        match tensor:
            case [int(kind), [*shape]] if all(isinstance(size, int) and 0 <= size < 2**64 for size in shape):
                if 0 <= kind < 2**32:
                    numbers = struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
                    entries.append(_text(name) + numbers)
                    size = _num_bytes(kind, shape)
                    data = _padded(data + (ONE * size)[:size])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(pairs))
    return _padded(head + b"".join(pairs + entries)) + data


def _num_bytes(kind: int, shape: list[int]) -> int:
    block, block_bytes = GGML_QUANT_SIZES.get(kind, (1, 0))  # type: ignore[call-overload]  # an IntEnum equals its number
    size = math.prod(shape) // block * block_bytes
    return size if size <= MAX_TENSOR_BYTES else 0


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % GGUF_DEFAULT_ALIGNMENT)


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    """Return type and value; empty for others."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int() if -(2**63) <= value < 2**63:
            return struct.pack("<Iq", 11, value)
        case float():
            return struct.pack("<Id", 12, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case list():
            items = [encoded for item in value if (encoded := _value(item))]
            kind = items[0][:4] if items else struct.pack("<I", 8)
            alike = [item[4:] for item in items if item[:4] == kind]
            return struct.pack("<I", 9) + kind + struct.pack("<Q", len(alike)) + b"".join(alike)
    return b""
