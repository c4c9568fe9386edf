"""Codec between Python values and a request's tensors."""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from tidewheel_client.answers import Chunk, PerfMetrics, TokenLogprob
from tidewheel_client.request_errors import InvalidRequest

Message = str | Mapping[str, object]

# Output flags with defaults. Counts tell how many tokens a coalesced chunk holds.
OUTPUT_FLAGS: dict[str, bool] = {
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_token_ids": False,
    "return_logprobs": False,
    "return_cumulative_logprob": False,
    "return_perf_metrics": False,
}
_PERF = (
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_new_blocks",
    "priority",
)
_PLAIN = frozenset({"text_output", "finish_reason", "num_input_tokens", "num_output_tokens"})
_NO_TEXT = bytes(4)
_OPEN = struct.pack("<I", 4) + b"None"  # the finish reason of a sequence that goes on
_MAX_TIMEOUT_MS = 1e12
_FORMATS = {"INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q", "FP32": "f", "FP64": "d", "BOOL": "?"}
_ONE = {datatype: struct.Struct(f"<{code}") for datatype, code in _FORMATS.items()}


def encode(
    model: str,
    request_id: str,
    prompt: Mapping[str, object],
    params: Mapping[str, object],
    *,
    stream: bool,
) -> service_pb2.ModelInferRequest:
    """Encode a request with a `prompt` of `prompt_input`, and perhaps its `task`."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in prompt.items():
        if name == "input_ids":
            ids = _token_ids(value)
            _add(request, name, "INT32", len(ids), ids.tobytes())
        else:
            _add_text(request, name, str(value))
    flags, sampling = _flags_and_sampling(params)
    for name, wanted in {"stream": stream, **flags}.items():
        _add_bool(request, name, wanted)
    _add_queue_fields(request, sampling)
    if sampling:
        _add_text(request, "sampling_parameters", _json("sampling parameters", sampling))
    return request


def json_body(
    request_id: str, prompt: Mapping[str, object], params: Mapping[str, object], *, stream: bool
) -> dict[str, object]:
    """Encode a request for `generate_stream`, with the arguments of `encode`."""
    given = {name: _token_ids(value).tolist() if name == "input_ids" else value for name, value in prompt.items()}
    flags, sampling = _flags_and_sampling(params)
    body = {"id": request_id, **given, "stream": stream, **flags}
    return body | ({"sampling_parameters": _json("sampling parameters", sampling)} if sampling else {})


def _flags_and_sampling(params: Mapping[str, object]) -> tuple[dict[str, bool], dict[str, object]]:
    """Return the output flags that are set, and the other parameters."""
    # The reason of the end tells a whole stream from a broken one.
    flags, sampling = {"exclude_input_in_output": True, "return_finish_reason": True}, dict(params)
    for flag, default in OUTPUT_FLAGS.items():
        wanted = sampling.pop(flag, default)
        if wanted not in (True, False):
            raise InvalidRequest(f"{flag} must be true or false, not {wanted!r}")
        if wanted or (flag == "return_num_output_tokens" and params.get("return_token_ids")):
            flags[flag] = True  # counts assign ids to sequences
    return flags, sampling


def prompt_input(
    prompt: str | None, messages: Sequence[Message] | str | None, input_ids: Sequence[int] | None
) -> dict[str, object]:
    """Return the prompt by tensor name; raise `InvalidRequest` unless exactly one is given."""
    given: dict[str, object] = {}
    if prompt is not None:
        given["text_input"] = prompt
    if messages is not None:
        given["messages"] = messages if isinstance(messages, str) else _json("messages", list(messages))
    if input_ids is not None:
        given["input_ids"] = input_ids
    if len(given) != 1:
        what = " and ".join(given) or "nothing"
        raise InvalidRequest(f"give exactly one of prompt, messages and input_ids, not {what}")
    return given


def decode(response: service_pb2.ModelInferResponse) -> list[Chunk]:
    names = [output.name for output in response.outputs]
    if _PLAIN.issuperset(names):  # most responses, at half the cost: types are slow to read from a message
        found = dict(zip(names, response.raw_output_contents, strict=True))
        text = found.get("text_output", _NO_TEXT)
        if _length(text) == len(text) - 4:  # of one sequence
            reason, num_input = found.get("finish_reason", _OPEN), found.get("num_input_tokens")
            num_output = found.get("num_output_tokens")
            return [
                Chunk(
                    text=text[4:].decode("utf-8", "replace"),
                    finish_reason=None if reason == _OPEN else _finish_reason(reason[4:].decode("utf-8", "replace")),
                    num_input_tokens=None if num_input is None else int.from_bytes(num_input, "little"),
                    num_output_tokens=None if num_output is None else int.from_bytes(num_output, "little"),
                )
            ]
    return chunks_of(_outputs(response))


def _length(raw: bytes) -> int:
    return int.from_bytes(raw[:4], "little")


def chunks_of(outputs: Mapping[str, tuple[Any, ...]]) -> list[Chunk]:
    """Return a chunk for each sequence, of the values by output."""
    texts = outputs.get("text_output", ("",))
    counts = outputs.get("num_output_tokens") or (None,) * len(texts)
    reasons = outputs.get("finish_reason")
    inputs = outputs.get("num_input_tokens")
    token_ids = _split(outputs.get("token_ids"), counts)
    return [
        Chunk(
            index=index,
            text=text,
            finish_reason=_finish_reason(reasons[index]) if reasons else None,
            num_input_tokens=inputs[0] if inputs else None,
            num_output_tokens=counts[index],
            token_ids=token_ids[index],
            logprobs=_logprobs(_element(outputs, "logprobs", index)),
            prompt_logprobs=_logprobs(_element(outputs, "prompt_logprobs", 0)) if index == 0 else None,
            embedding=outputs.get("embedding"),
            cumulative_logprob=_element(outputs, "cumulative_logprob", index),
            perf=_perf(outputs, index),
        )
        for index, text in enumerate(texts)
    ]


def _outputs(response: service_pb2.ModelInferResponse) -> dict[str, tuple[Any, ...]]:
    """Return the values by name."""
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: _unpack(output.datatype, raw) for output, raw in pairs}


def _element(outputs: Mapping[str, tuple[Any, ...]], name: str, index: int) -> Any:
    values = outputs.get(name)
    return values[index] if values else None


def _finish_reason(text: str | None) -> str | None:
    return None if text in (None, "", "None") else text


def _split(token_ids: tuple[int, ...] | None, counts: Sequence[int | None]) -> list[tuple[int, ...] | None]:
    """Split concatenated ids by sequence."""
    if token_ids is None:
        return [None] * len(counts)
    if len(counts) == 1:
        return [token_ids]
    parts: list[tuple[int, ...] | None] = []
    start = 0
    for count in counts:
        parts.append(token_ids[start : start + (count or 0)])
        start += count or 0
    return parts


def _perf(outputs: Mapping[str, tuple[Any, ...]], index: int) -> PerfMetrics | None:
    if not all(outputs.get(name) for name in _PERF):
        return None
    cached = _element(outputs, "num_cached_tokens", index) or 0
    return PerfMetrics(**{name: outputs[name][index] for name in _PERF}, num_cached_tokens=cached)


def _unpack(datatype: str, raw: bytes) -> tuple[Any, ...]:
    if datatype == "BYTES":
        if _length(raw) == len(raw) - 4:
            return (raw[4:].decode("utf-8", "replace"),)
        return tuple(_strings(raw))
    one = _ONE[datatype]
    if len(raw) == one.size:
        return one.unpack(raw)
    return struct.unpack(f"<{len(raw) // one.size}{_FORMATS[datatype]}", raw)


def _strings(raw: bytes) -> list[str]:
    strings, start = [], 0
    while start < len(raw):
        end = start + 4 + int.from_bytes(raw[start : start + 4], "little")
        strings.append(raw[start + 4 : end].decode("utf-8", "replace"))
        start = end
    return strings


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


def _token_ids(value: Any) -> array[int]:
    try:
        ids: array[int] = array("i", value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest("input_ids must be a sequence of int32 token ids") from None
    return ids


def _json(what: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{what} cannot be written as JSON: {error}") from None


def _add_queue_fields(request: service_pb2.ModelInferRequest, params: Mapping[str, object]) -> None:
    """Copy priority and deadline to where Triton's queue reads them."""
    priority, deadline_ms = params.get("priority"), params.get("deadline_ms")
    if isinstance(priority, int) and 0 < priority < 2**31:
        request.parameters["priority"].uint64_param = int(priority)
    if isinstance(deadline_ms, int | float) and 0 < deadline_ms < _MAX_TIMEOUT_MS:
        request.parameters["timeout"].int64_param = max(1, int(deadline_ms * 1000))


def _add_bool(request: service_pb2.ModelInferRequest, name: str, value: bool) -> None:
    _add(request, name, "BOOL", 1, struct.pack("<?", value))


def _add_text(request: service_pb2.ModelInferRequest, name: str, text: str) -> None:
    # The server reports lone surrogates, so send them.
    data = text.encode("utf-8", "surrogatepass")
    _add(request, name, "BYTES", 1, struct.pack("<I", len(data)) + data)


def _add(request: service_pb2.ModelInferRequest, name: str, datatype: str, count: int, raw: bytes) -> None:
    tensor = request.inputs.add()
    tensor.name, tensor.datatype = name, datatype
    tensor.shape.append(count)
    request.raw_input_contents.append(raw)
