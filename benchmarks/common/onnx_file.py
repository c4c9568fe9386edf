"""ONNX files made by hand, field by field of onnx.proto, and two models of the sizes that people serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FLOAT, INT64, STRING = 1, 7, 8
_INTS = 7  # type of an attribute
Tensor = tuple[str, int, Sequence[int | str]]  # name, element type, dimensions
Values = npt.NDArray[np.float32] | npt.NDArray[np.int64]


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


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Sequence[int]) -> bytes:
    fields = [*(field(1, i) for i in inputs), *(field(2, o) for o in outputs), field(4, op)]
    for name, numbers in attributes.items():
        ints = b"".join(field(8, number) for number in numbers)
        fields.append(field(5, field(1, name) + ints + field(20, _INTS)))
    return b"".join(fields)


def weights(name: str, values: Values, external: Mapping[str, str] | None = None) -> bytes:
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


def image_classifier(size: int = 160, classes: int = 1000) -> bytes:
    """Return a model of four convolutions of random weights, 10^8 multiplications at the default size.

    image FP32 [batch, 3, size, size], scores FP32 [batch, classes].
    """
    rng, channels = np.random.default_rng(0), (3, 32, 64, 128, 256)
    nodes, tensors, at = [], [], "image"
    for index, (before, after) in enumerate(pairwise(channels)):
        tensors.append(weights(f"w{index}", _random(rng, (after, before, 3, 3), 9 * before)))
        nodes.append(node("Conv", [at, f"w{index}"], [f"c{index}"], strides=(2, 2), pads=(1, 1, 1, 1)))
        nodes.append(node("Relu", [f"c{index}"], [at := f"r{index}"]))
    tensors.append(weights("w", _random(rng, (channels[-1], classes), channels[-1])))
    nodes += [node("GlobalAveragePool", [at], ["p"]), node("Flatten", ["p"], ["f"])]
    nodes.append(node("MatMul", ["f", "w"], ["scores"]))
    io = ("image", FLOAT, ("batch", 3, size, size)), ("scores", FLOAT, ("batch", classes))
    return model(nodes, io[:1], io[1:], *tensors)


def speech_detector(window: int = 512, layers: int = 4) -> bytes:
    """Return a model of small products of random weights: window FP32 [batch, window], speech FP32 [batch, 1]."""
    rng, nodes, tensors, at = np.random.default_rng(1), [], [], "window"
    for index in range(layers):
        tensors.append(weights(f"w{index}", _random(rng, (window, window), window)))
        nodes += [node("MatMul", [at, f"w{index}"], [f"m{index}"]), node("Relu", [f"m{index}"], [at := f"r{index}"])]
    tensors.append(weights("w", _random(rng, (window, 1), window)))
    nodes += [node("MatMul", [at, "w"], ["m"]), node("Sigmoid", ["m"], ["speech"])]
    io = ("window", FLOAT, ("batch", window)), ("speech", FLOAT, ("batch", 1))
    return model(nodes, io[:1], io[1:], *tensors)


def _random(rng: np.random.Generator, shape: Sequence[int], fan_in: int) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = (rng.standard_normal(shape) * (2.0 / fan_in) ** 0.5).astype(np.float32)
    return values
