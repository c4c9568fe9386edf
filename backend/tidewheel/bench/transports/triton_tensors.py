"""Requests as Triton tensors, with only the inputs a model declares."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from tidewheel.bench import BenchError
from tidewheel.bench.outcome import Offered, words

_FLAGS = ("return_num_output_tokens", "return_finish_reason", "exclude_input_in_output")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Inputs and outputs, from a model's configuration."""

    name: str
    inputs: frozenset[str]
    outputs: frozenset[str]
    is_batched: bool  # leading batch dimension
    is_decoupled: bool

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """Raise `BenchError` without an input for prompts."""
        shape = cls(
            name=config.name,
            inputs=frozenset(tensor.name for tensor in config.input),
            outputs=frozenset(tensor.name for tensor in config.output),
            is_batched=config.max_batch_size > 0,
            is_decoupled=config.model_transaction_policy.decoupled,
        )
        if not shape.inputs & {"input_ids", "text_input"}:
            raise BenchError(f"model {shape.name!r} has neither input_ids nor text_input: it takes no prompt")
        return shape


def build_request(
    shape: ModelShape, offered: Offered, input_ids: Sequence[int], *, with_ids: bool
) -> pb.ModelInferRequest:
    """Build a greedy, full-length request; drop parameters without an input, as baselines have no QoS."""
    message = pb.ModelInferRequest(model_name=shape.name)
    if "input_ids" in shape.inputs:
        ids = struct.pack(f"<{len(input_ids)}i", *input_ids)
        _add(message, shape, "input_ids", "INT32", len(input_ids), ids)
    else:
        _add_text(message, shape, "text_input", words(input_ids))
    length = offered.num_output_tokens
    if "sampling_parameters" in shape.inputs:
        sampling = {"max_tokens": length, "temperature": 0, "ignore_eos": True, **offered.parameters}
        _add_text(message, shape, "sampling_parameters", json.dumps(sampling))
    else:
        _add(message, shape, "max_tokens", "INT32", 1, struct.pack("<i", length))
        if "ignore_eos" in shape.inputs:
            _add(message, shape, "ignore_eos", "BOOL", 1, b"\x01")
    if "stream" in shape.inputs:
        _add(message, shape, "stream", "BOOL", 1, b"\x01" if shape.is_decoupled else b"\x00")
    for flag in (*_FLAGS, *(("return_token_ids",) if with_ids else ())):
        if flag in shape.inputs:
            _add(message, shape, flag, "BOOL", 1, b"\x01")
    return message


@dataclass(frozen=True, slots=True)
class Piece:
    num_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str


def read_response(response: Any, expected: int) -> Piece:
    """Read a response; assume `expected` tokens where the model does not count: one in a stream, all of an answer."""
    tensors = zip(response.outputs, response.raw_output_contents, strict=True)
    raw = {tensor.name: data for tensor, data in tensors}
    if "num_output_tokens" in raw:
        (count,) = struct.unpack("<I", raw["num_output_tokens"][:4])
    else:
        count = expected if raw.get("text_output", b"")[4:] else 0
    ids = raw.get("token_ids", b"")
    reason = raw.get("finish_reason", b"")[4:].decode(errors="replace")
    return Piece(count, struct.unpack(f"<{len(ids) // 4}i", ids), "" if reason == "None" else reason)


def _add_text(message: pb.ModelInferRequest, shape: ModelShape, name: str, text: str) -> None:
    data = text.encode()
    _add(message, shape, name, "BYTES", 1, struct.pack("<I", len(data)) + data)


def _add(message: pb.ModelInferRequest, shape: ModelShape, name: str, datatype: str, size: int, raw: bytes) -> None:
    tensor = message.inputs.add()
    tensor.name, tensor.datatype = name, datatype
    tensor.shape.extend([1, size] if shape.is_batched else [size])
    message.raw_input_contents.append(raw)
