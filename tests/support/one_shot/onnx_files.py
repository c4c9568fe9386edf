"""ONNX files made by hand, field by field of onnx.proto: tests need no package that writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

FLOAT, INT64, STRING = 1, 7, 8
Tensor = tuple[str, int, Sequence[int | str]]  # name, element type, dimensions


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def node(op: str, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    return b"".join([*(field(1, i) for i in inputs), *(field(2, o) for o in outputs), field(4, op)])


def weights(name: str, values: np.ndarray, external: Mapping[str, str] | None = None) -> bytes:
    kind = FLOAT if values.dtype == np.float32 else INT64
    head = b"".join(field(1, size) for size in values.shape) + field(2, kind) + field(8, name)
    if external is None:
        return head + field(9, values.tobytes())
    entries = (field(13, field(1, key) + field(2, value)) for key, value in external.items())
    return head + b"".join(entries) + field(14, 1)


def model(nodes: Sequence[bytes], inputs: Sequence[Tensor], outputs: Sequence[Tensor], *tensors: bytes) -> bytes:
    graph = b"".join(
        [
            *(field(1, one) for one in nodes),
            field(2, "graph"),
            *(field(5, one) for one in tensors),
            *(field(11, _value(one)) for one in inputs),
            *(field(12, _value(one)) for one in outputs),
        ]
    )
    return field(1, 8) + field(7, graph) + field(8, field(1, "") + field(2, 17))


def _value(tensor: Tensor) -> bytes:
    name, kind, dims = tensor
    shape = b"".join(field(1, field(2, dim) if isinstance(dim, str) else field(1, dim)) for dim in dims)
    return field(1, name) + field(2, field(1, field(1, kind) + field(2, shape)))


def scaled(width: int = 4) -> bytes:
    """Return a model of y = log(x · w): x FP32 [batch, width], y FP32 [batch, 2], w[i] = [i, 1]."""
    w = np.stack([np.arange(width), np.ones(width)], 1).astype(np.float32)
    nodes = [node("MatMul", ["x", "w"], ["z"]), node("Log", ["z"], ["y"])]
    return model(nodes, [("x", FLOAT, ("batch", width))], [("y", FLOAT, ("batch", 2))], weights("w", w))


def looked_up() -> bytes:
    """Return a model that raises for indices above 3: rows [batch, length] of the table 10, 11, 12, 13."""
    table = np.arange(10, 14, dtype=np.float32)
    io = ("rows", INT64, ("batch", "length")), ("values", FLOAT, ("batch", "length"))
    return model([node("Gather", ["table", "rows"], ["values"])], io[:1], io[1:], weights("table", table))
