"""Decoding of gRPC responses to chunks.

Python reads protobuf slowly, and a stream's responses describe their tensors alike. So our class of Triton's message
keeps descriptions (names, types, shapes) as bytes, and equal bytes are read once.
"""

import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tritonclient.grpc import service_pb2

from tidewheel_client.answers import Chunk, PerfMetrics, Picture, TokenLogprob

_PERF = tuple(field.name for field in fields(PerfMetrics) if field.default is MISSING)
_NEWER_PERF = tuple(field.name for field in fields(PerfMetrics) if field.default is not MISSING)
_PLAIN = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
_NO_TEXT = bytes(4)
_OPEN = (None, struct.pack("<I", 4) + b"None")  # finish reasons of an open sequence
_FORMATS = {"INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q", "FP32": "f", "FP64": "d", "BOOL": "?"}
_ONE = {datatype: struct.Struct(f"<{code}") for datatype, code in _FORMATS.items()}
_MAX_LAYOUTS = 1024


def _stream_response() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="tidewheel_responses.proto", package="inference", syntax="proto3")
    whole, inner = file.message_type.add(), file.message_type.add()
    service_pb2.ModelStreamInferResponse.DESCRIPTOR.CopyToProto(whole)
    service_pb2.ModelInferResponse.DESCRIPTOR.CopyToProto(inner)
    outputs, contents = (field for field in inner.field if field.name in ("outputs", "raw_output_contents"))
    outputs.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    outputs.ClearField("type_name")
    inner.CopyFrom(descriptor_pb2.DescriptorProto(name=inner.name, field=[outputs, contents]))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{whole.name}"))


StreamResponse = _stream_response()


class _OutputLayout(NamedTuple):
    outputs: tuple[tuple[str, str, Sequence[int]], ...]  # name, datatype, shape
    pick: Callable[[Sequence[Any]], tuple[Any, ...]] | None  # values of `_PLAIN`, if there are no others


@lru_cache(_MAX_LAYOUTS)
def _layout(descriptions: tuple[bytes, ...]) -> _OutputLayout:
    read = service_pb2.ModelInferResponse.InferOutputTensor.FromString
    outputs = tuple((each.name, each.datatype, tuple(each.shape)) for each in map(read, descriptions))
    names = [name for name, _, _ in outputs]
    indices = (names.index(name) if name in names else -1 for name in _PLAIN)
    return _OutputLayout(outputs, itemgetter(*indices) if set(_PLAIN).issuperset(names) else None)


def decode(response: Any) -> list[Chunk]:
    """Return a chunk per sequence of `StreamResponse.infer_response`."""
    layout, raws = _layout(tuple(response.outputs)), response.raw_output_contents
    if layout.pick is not None:  # most responses
        text, reason, num_input, num_output = layout.pick([*raws, None])
        if text is None:
            text = _NO_TEXT
        if int.from_bytes(text[:4], "little") == len(text) - 4:  # of one sequence
            return [
                Chunk(
                    text=text[4:].decode("utf-8", "replace"),
                    finish_reason=None if reason in _OPEN else _finish_reason(reason[4:].decode("utf-8", "replace")),
                    num_input_tokens=None if num_input is None else int.from_bytes(num_input, "little"),
                    num_output_tokens=None if num_output is None else int.from_bytes(num_output, "little"),
                )
            ]
    columns = zip(layout.outputs, raws, strict=True)
    return chunks_of({name: _unpack(datatype, raw, shape) for (name, datatype, shape), raw in columns})


def tensors(response: service_pb2.ModelInferResponse) -> dict[str, tuple[Any, ...]]:
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: _unpack(output.datatype, raw) for output, raw in pairs}


def _length(raw: bytes) -> int:
    return int.from_bytes(raw[:4], "little")


def chunks_of(outputs: Mapping[str, tuple[Any, ...]]) -> list[Chunk]:
    """Return a chunk per sequence. `outputs`: tensors by name."""
    texts = outputs.get("text_output", ("",))
    counts = outputs.get("num_output_tokens") or (None,) * len(texts)
    token_ids = _split(outputs.get("token_ids"), counts)
    return [
        Chunk(
            index=index,
            text=text,
            finish_reason=_finish_reason(_element(outputs, "finish_reason", index)),
            num_input_tokens=_element(outputs, "num_input_tokens", 0),
            num_output_tokens=counts[index],
            token_ids=token_ids[index],
            logprobs=_logprobs(_element(outputs, "logprobs", index)),
            prompt_logprobs=_logprobs(_element(outputs, "prompt_logprobs", 0)) if index == 0 else None,
            embedding=outputs.get("embedding"),
            language=_element(outputs, "language", 0),
            seconds=outputs.get("audio_seconds"),
            cumulative_logprob=_element(outputs, "cumulative_logprob", index),
            perf=_perf(outputs, index),
            picture=_picture(outputs),
        )
        for index, text in enumerate(texts)
    ]


def _element(outputs: Mapping[str, tuple[Any, ...]], name: str, index: int) -> Any:
    values = outputs.get(name)
    return values[index] if values else None


def _finish_reason(text: str | None) -> str | None:
    return None if text in (None, "", "None") else text


def _split(token_ids: tuple[int, ...] | None, counts: Sequence[int | None]) -> list[tuple[int, ...] | None]:
    if token_ids is None:
        return [None] * len(counts)
    if len(counts) == 1:
        return [token_ids]
    ends = itertools.accumulate((count or 0 for count in counts), initial=0)
    return [token_ids[start:end] for start, end in itertools.pairwise(ends)]


def _perf(outputs: Mapping[str, tuple[Any, ...]], index: int) -> PerfMetrics | None:
    if not all(outputs.get(name) for name in _PERF):
        return None
    return PerfMetrics(**{name: outputs[name][index] for name in (*_PERF, *_NEWER_PERF) if outputs.get(name)})


def _picture(outputs: Mapping[str, tuple[Any, ...]]) -> Picture | None:
    if "steps" not in outputs:
        return None
    image, png = _element(outputs, "image", 0), _element(outputs, "png", 0) or ""
    return Picture(step=outputs["step"][0], steps=outputs["steps"][0], image=image, png_base64=png)


def _unpack(datatype: str, raw: bytes, shape: Sequence[int] = (-1,)) -> tuple[Any, ...]:
    if datatype == "UINT8":  # of a picture
        return (np.frombuffer(raw, np.uint8).reshape(shape),)
    if datatype == "BYTES":
        return (raw[4:].decode("utf-8", "replace"),) if _length(raw) == len(raw) - 4 else tuple(_strings(raw))
    one = _ONE[datatype]
    if len(raw) == one.size:
        return one.unpack(raw)
    return struct.unpack(f"<{len(raw) // one.size}{_FORMATS[datatype]}", raw)


def _strings(raw: bytes) -> Iterator[str]:
    while raw:
        end = 4 + _length(raw)
        yield raw[4:end].decode("utf-8", "replace")
        raw = raw[end:]


def _logprobs(text: str | None) -> tuple[dict[int, TokenLogprob], ...] | None:
    if text in (None, "null"):  # null: `logprobs` was not given
        return None
    return tuple(
        {
            int(token_id): TokenLogprob(
                logprob=-math.inf if entry["logprob"] is None else float(entry["logprob"]),
                rank=int(entry["rank"] or 0),
                decoded_token=str(entry["decoded_token"]),
            )
            for token_id, entry in entries.items()
        }
        for entries in json.loads(text)
    )
