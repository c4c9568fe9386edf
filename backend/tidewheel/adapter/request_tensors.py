from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

import numpy as np

from tidewheel.adapter.responder import ResponseFormat
from tidewheel.adapter.tensors import RETURN_FLAGS, SAMPLING_INPUTS, IoDialect
from tidewheel.batch import Int32Array
from tidewheel.errors import InvalidRequest
from tidewheel.frontend.coercion import check_size, parse_json, show, to_text
from tidewheel.frontend.interface import INPUT_TENSOR, GenerateRequest, ParameterSource, Task

MAX_PARAMETER_BYTES = 1 << 18  # each; the largest legal one needs some 40 KB
_TRACE_HEADERS = ("traceparent", "tracestate")  # that Triton or the gateway sends as parameters
_MAX_TRACEPARENT_CHARS = 128
_LENGTH_BYTES = 4  # before each string of a STRING tensor

_SAMPLING_NAMES = frozenset(spec.name for spec in SAMPLING_INPUTS)
_LIST_NAMES = frozenset(spec.name for spec in SAMPLING_INPUTS if spec.dims == (-1,))


def read_request(
    request: Any,
    *,
    decoupled: bool,
    max_prompt_bytes: int,
    arrival_ns: int,
    max_request_s: float | None = None,
    dialect: IoDialect = "vllm",
    traced: bool = False,
) -> tuple[GenerateRequest, ResponseFormat]:
    """Raise `InvalidRequest`."""
    inputs = {tensor.name(): tensor for tensor in request.inputs()}
    stream = _flag(inputs, "stream")
    if stream and not decoupled:
        raise InvalidRequest("stream is true, and this model answers once: use the decoupled model, or leave it out")
    # A rendered template is not echoed by default: the client did not write it.
    exclude_input = _flag(inputs, "exclude_input_in_output", default=stream or "messages" in inputs)
    is_trtllm = dialect == "trtllm"
    if stream and not exclude_input and not is_trtllm:
        # The text of Triton's vLLM backend, whose clients compare it.
        raise InvalidRequest(
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
        )
    parameters = _parameters(request, inputs, is_trtllm=is_trtllm)
    has_logprobs = any(source.values.get("logprobs") is not None for source in parameters)
    response_format = ResponseFormat(
        accumulate=_flag(inputs, "accumulate_tokens"),
        is_logprobs_null=_flag(inputs, "return_logprobs") and not has_logprobs,
        is_trtllm=is_trtllm,
        one_by_one=is_trtllm and decoupled,
        **{name.removeprefix("return_"): _flag(inputs, name) for name in RETURN_FLAGS},
    )
    if not has_logprobs and (response_format.cumulative_logprob or response_format.log_probs):
        parameters = (*parameters, ParameterSource(origin="output flag", values={"logprobs": 0}))  # the chosen alone
    return GenerateRequest(
        request_id=request.request_id(),
        task=_task(inputs),
        text=_bytes(inputs, "text_input", max_prompt_bytes, "max_prompt_bytes"),
        input_ids=_token_ids(inputs, max_prompt_bytes),
        messages=_bytes(inputs, "messages", max_prompt_bytes, "max_prompt_bytes"),
        parameters=parameters,
        stream=stream,
        echo=not exclude_input,
        arrival_ns=arrival_ns,
        traceparent=_traceparent(request) if traced else "",
        timeout_us=_time_limit_us(request.timeout(), max_request_s),
    ), response_format


def _task(inputs: Mapping[str, Any]) -> Task:
    text = to_text("task", _scalar(inputs["task"])) if "task" in inputs else "generate"
    for known in get_args(Task):
        if text == known:
            return cast(Task, known)
    raise InvalidRequest(f"task is {show(text)}: it must be {', '.join(get_args(Task))}")


def _time_limit_us(timeout_us: int, max_request_s: float | None) -> int:
    if max_request_s is None:
        return timeout_us
    limit_us = math.ceil(max_request_s * 1e6)
    return min(timeout_us or limit_us, limit_us)


def _parameters(request: Any, inputs: Mapping[str, Any], *, is_trtllm: bool) -> tuple[ParameterSource, ...]:
    tensors = {name: _parameter(inputs[name]) for name in inputs.keys() & _SAMPLING_NAMES}
    sources = (
        ParameterSource(origin="sampling_parameters", values=_json_parameters(inputs)),
        ParameterSource(origin="request parameter", values=_request_parameters(request)),
        ParameterSource(origin=INPUT_TENSOR, values=tensors),
    )
    if is_trtllm:
        _adapt(tensors, sources)
    return tuple(source for source in sources if source.values)


def _adapt(tensors: dict[str, object], sources: Iterable[ParameterSource]) -> None:
    """Apply TensorRT-LLM's meanings: a `top_p` of 0 is off, stop words stay in the text."""
    name = "include_stop_str_in_output"
    if tensors.get("top_p") == 0:
        del tensors["top_p"]
    if "stop_words" in tensors and all(name not in source.values for source in sources):
        tensors[name] = True


def _json_parameters(inputs: Mapping[str, Any]) -> dict[str, object]:
    data = _bytes(inputs, "sampling_parameters", MAX_PARAMETER_BYTES)
    if not data:
        return {}
    values = parse_json(data, "sampling_parameters")
    if not isinstance(values, dict):
        raise InvalidRequest(f"sampling_parameters must be a JSON object, not a {type(values).__name__}")
    return values


def _request_parameters(request: Any) -> dict[str, object]:
    # A name after a NUL would replace a proxy's: Triton joins them.
    values = cast(dict[str, object], parse_json(request.parameters() or "{}", "parameters"))
    values.pop("id", None)  # of `/generate`
    for name in _TRACE_HEADERS:
        values.pop(name, None)
    return values


def _traceparent(request: Any) -> str:
    """Return Triton's span, if it traces for OpenTelemetry, else the client's."""
    context = request.trace().get_context()
    carried = json.loads(context) if context else json.loads(request.parameters() or "{}")
    found = carried.get("traceparent", "")
    return found if isinstance(found, str) and len(found) <= _MAX_TRACEPARENT_CHARS else ""


def _parameter(tensor: Any) -> object:
    name = tensor.name()
    items = tensor.as_numpy().reshape(-1)
    is_text = items.dtype == np.object_
    num_bytes = sum(_LENGTH_BYTES + len(item) for item in items) if is_text else items.nbytes
    check_size(name, num_bytes, MAX_PARAMETER_BYTES)
    if name in _LIST_NAMES:
        return [_to_python(name, item) for item in items]
    if name == "logit_bias":
        return parse_json(_scalar(tensor), name)
    return _to_python(name, _scalar(tensor))


def _to_python(name: str, item: Any) -> object:
    if isinstance(item, bytes):
        return to_text(name, item)
    if isinstance(item, np.int32) and item < -1:
        raise InvalidRequest(
            f"{name} arrived as {item}, and takes nothing below -1. Its tensor is INT32, to which Triton narrows "
            "larger numbers: send at most 2147483647"
        )
    return float(str(item)) if isinstance(item, np.float32) else item.item()  # 0.7, not 0.699999988


def _scalar(tensor: Any) -> Any:
    array = tensor.as_numpy().reshape(-1)
    if array.size != 1:
        raise InvalidRequest(f"{tensor.name()} has {array.size} elements: it must have one")
    return array[0]


def _flag(inputs: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    return bool(_scalar(inputs[name])) if name in inputs else default


def _bytes(inputs: Mapping[str, Any], name: str, limit: int, setting: str = "") -> bytes | None:
    if name not in inputs:
        return None
    value: bytes = _scalar(inputs[name])
    check_size(name, len(value), limit, setting)
    return value


def _token_ids(inputs: Mapping[str, Any], limit: int) -> Int32Array | None:
    """Return a copy, because Triton may free its memory after `execute`."""
    if "input_ids" not in inputs:
        return None
    ids = inputs["input_ids"].as_numpy().reshape(-1)
    check_size("input_ids", ids.nbytes, limit, "max_prompt_bytes")
    copy: Int32Array = np.array(ids, dtype=np.int32)
    return copy
