import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from tidewheel_client.errors import InvalidRequest, Unsupported
from tidewheel_client.transport import Ask

Message = str | Mapping[str, object]

PRIORITIES = {"critical": 1, "high": 2, "normal": 3, "low": 4}
OUTPUT_FLAGS: dict[str, bool] = {
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_token_ids": False,
    "return_logprobs": False,
    "return_cumulative_logprob": False,
    "return_perf_metrics": False,
}
_INT32 = {"input_ids": "a sequence of int32 token ids", "label": "a number, an int32"}
_MAX_TIMEOUT_MS = 1e12


def encode(ask: Ask) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=ask.model, id=ask.request_id)
    for name, value in _inputs(ask).items():
        if isinstance(value, array):
            datatype, count, raw = "INT32", len(value), value.tobytes()
        elif isinstance(value, bool):
            datatype, count, raw = "BOOL", 1, struct.pack("<?", value)
        else:
            # The server reports lone surrogates, so send them.
            data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
            datatype, count, raw = "BYTES", 1, struct.pack("<I", len(data)) + data
        tensor = request.inputs.add()
        tensor.name, tensor.datatype = name, datatype
        tensor.shape.append(count)
        request.raw_input_contents.append(raw)
    if ask.as_parameters:
        for name, text in _parameters(ask.params).items():
            request.parameters[name].string_param = text
    else:
        _add_queue_fields(request, ask.params)
    return request


def json_body(ask: Ask) -> dict[str, object]:
    """Return the body for `generate_stream`."""
    inputs = {name: value.tolist() if isinstance(value, array) else value for name, value in _inputs(ask).items()}
    if ask.as_parameters and ask.params.get("format") != "png_base64":
        raise Unsupported("over HTTP, a picture is a file: give format='png_base64', or use gRPC's HOST:PORT")
    return {"id": ask.request_id, **inputs, **(_parameters(ask.params) if ask.as_parameters else {})}


def _inputs(ask: Ask) -> dict[str, Any]:
    """Return input tensors by name: arrays of int32, texts, and flags."""
    inputs = {name: _int32(name, value) if name in _INT32 else value for name, value in ask.prompt.items()}
    if ask.as_parameters:
        return inputs
    # A finish reason tells a whole stream from a broken one.
    inputs |= {"stream": ask.stream, "exclude_input_in_output": True, "return_finish_reason": True}
    sampling = dict(ask.params)
    for flag, default in OUTPUT_FLAGS.items():
        wanted = sampling.pop(flag, default)
        if wanted not in (True, False):
            raise InvalidRequest(f"{flag} must be true or false, not {wanted!r}")
        if wanted or (flag == "return_num_output_tokens" and ask.params.get("return_token_ids")):
            inputs[flag] = True  # counts assign ids to sequences
    return inputs | ({"sampling_parameters": _json("sampling parameters", sampling)} if sampling else {})


def prompt_input(
    prompt: str | None, messages: Sequence[Message] | str | None, input_ids: Sequence[int] | None
) -> dict[str, object]:
    """Return the prompt by tensor name. Raise `InvalidRequest` unless exactly one is given."""
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


def _int32(name: str, value: Any) -> "array[int]":
    try:
        numbers: array[int] = array("i", value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(f"{name} must be {_INT32[name]}") from None
    return numbers


def _json(what: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{what} cannot be written as JSON: {error}") from None


def to_number(priority: object) -> object:
    """Return the number of a QoS class that is given by name, in any case; any other value as it is."""
    return PRIORITIES.get(priority.strip().lower(), priority) if isinstance(priority, str) else priority


def _add_queue_fields(request: service_pb2.ModelInferRequest, params: Mapping[str, object]) -> None:
    priority, deadline_ms = to_number(params.get("priority")), params.get("deadline_ms")
    if isinstance(priority, int) and 0 < priority < 2**31:
        request.parameters["priority"].uint64_param = int(priority)
    if isinstance(deadline_ms, int | float) and 0 < deadline_ms < _MAX_TIMEOUT_MS:
        request.parameters["timeout"].int64_param = max(1, int(deadline_ms * 1000))


def _parameters(params: Mapping[str, object]) -> dict[str, str]:
    """Return them as a request's parameters. Triton keeps `priority` for itself."""
    given = {name: str(value) for name, value in params.items() if value is not None}
    return {"qos_class" if name == "priority" else name: text for name, text in given.items()}
