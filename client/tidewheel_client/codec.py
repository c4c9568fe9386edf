"""Between Python values and the tensors of one request: `ModelInferRequest` out, `ModelInferResponse` in."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from tidewheel_client.errors import InvalidRequest
from tidewheel_client.values import Chunk, PerfMetrics, TokenLogprob

Message = str | Mapping[str, object]

# Outputs that a request asks for, and whether it does unless told otherwise. The counts are cheap and tell
# a reader how many tokens a coalesced chunk holds.
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
)
_FORMATS = {"INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q", "FP32": "f", "FP64": "d", "BOOL": "?"}


def encode(
    model: str,
    request_id: str,
    prompt: Mapping[str, object],
    params: Mapping[str, object],
    *,
    stream: bool,
) -> service_pb2.ModelInferRequest:
    """One request. `prompt` is what `prompt_input` returns; `params` holds sampling keys and `return_…` flags."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    (name, value), *_ = prompt.items()
    if name == "input_ids":
        ids = _token_ids(value)
        _add(request, name, "INT32", len(ids), struct.pack(f"<{len(ids)}i", *ids))
    else:
        _add_text(request, name, str(value))
    _add_bool(request, "stream", stream)
    _add_bool(request, "exclude_input_in_output", True)
    _add_bool(request, "return_finish_reason", True)  # it is what tells a whole stream from a broken one
    sampling = dict(params)
    for flag, default in OUTPUT_FLAGS.items():
        wanted = sampling.pop(flag, default)
        if wanted not in (True, False):
            raise InvalidRequest(f"{flag} must be true or false, not {wanted!r}")
        if wanted:
            _add_bool(request, flag, True)
    if sampling:
        _add_text(request, "sampling_parameters", _json("sampling parameters", sampling))
    return request


def prompt_input(
    prompt: str | None, messages: Sequence[Message] | str | None, input_ids: Sequence[int] | None
) -> dict[str, object]:
    """The one input that carries the prompt, by tensor name. Raises `InvalidRequest` unless just one is given."""
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


def decode(response: service_pb2.ModelInferResponse) -> Chunk:
    """One response as a chunk."""
    outputs = _outputs(response)
    finish_reason = _first(outputs, "finish_reason")
    logprobs = _first(outputs, "logprobs")
    token_ids = outputs.get("token_ids")
    return Chunk(
        text=_first(outputs, "text_output") or "",
        finish_reason=None if finish_reason in (None, "", "None") else finish_reason,
        num_input_tokens=_first(outputs, "num_input_tokens"),
        num_output_tokens=_first(outputs, "num_output_tokens"),
        token_ids=None if token_ids is None else tuple(token_ids),
        logprobs=None if logprobs is None else _logprobs(logprobs),
        cumulative_logprob=_first(outputs, "cumulative_logprob"),
        perf=PerfMetrics(**{name: outputs[name][0] for name in _PERF}) if _has_perf(outputs) else None,
    )


def _outputs(response: service_pb2.ModelInferResponse) -> dict[str, tuple[Any, ...]]:
    return {
        output.name: _unpack(output.datatype, raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _first(outputs: Mapping[str, tuple[Any, ...]], name: str) -> Any:
    values = outputs.get(name)
    return values[0] if values else None


def _has_perf(outputs: Mapping[str, tuple[Any, ...]]) -> bool:
    return all(outputs.get(name) for name in _PERF)


def _unpack(datatype: str, raw: bytes) -> tuple[Any, ...]:
    if datatype == "BYTES":
        return tuple(_strings(raw))
    code = _FORMATS[datatype]
    return struct.unpack(f"<{len(raw) // struct.calcsize('<' + code)}{code}", raw)


def _strings(raw: bytes) -> list[str]:
    strings, start = [], 0
    while start < len(raw):
        (size,) = struct.unpack_from("<I", raw, start)
        start += 4 + size
        strings.append(raw[start - size : start].decode("utf-8", "replace"))
    return strings


def _logprobs(text: str) -> tuple[dict[int, TokenLogprob], ...]:
    return tuple(
        {
            int(token_id): TokenLogprob(
                logprob=-math.inf if entry["logprob"] is None else float(entry["logprob"]),
                rank=int(entry["rank"]),
                decoded_token=str(entry["decoded_token"]),
            )
            for token_id, entry in entries.items()
        }
        for entries in json.loads(text)
    )


def _token_ids(value: object) -> list[int]:
    try:
        ids = [int(i) for i in value]  # type: ignore[attr-defined]
        struct.pack(f"<{len(ids)}i", *ids)
    except (TypeError, ValueError, struct.error):
        raise InvalidRequest("input_ids must be a sequence of int32 token ids") from None
    return ids


def _json(what: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{what} cannot be written as JSON: {error}") from None


def _add_bool(request: service_pb2.ModelInferRequest, name: str, value: bool) -> None:
    _add(request, name, "BOOL", 1, struct.pack("<?", value))


def _add_text(request: service_pb2.ModelInferRequest, name: str, text: str) -> None:
    # Lone surrogates go out as they are, so that the server says what is wrong with them.
    data = text.encode("utf-8", "surrogatepass")
    _add(request, name, "BYTES", 1, struct.pack("<I", len(data)) + data)


def _add(request: service_pb2.ModelInferRequest, name: str, datatype: str, count: int, raw: bytes) -> None:
    tensor = request.inputs.add()
    tensor.name, tensor.datatype = name, datatype
    tensor.shape.append(count)
    request.raw_input_contents.append(raw)
