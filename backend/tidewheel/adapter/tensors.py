"""Input and output tensors of Triton's vLLM backend, the TRT-LLM ensemble, and Tidewheel."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.frontend.coercion import INPUT_TENSOR, ParameterSource, check_size, expect, parse_json, show, to_text
from tidewheel.frontend.request_parameters import FIELDS, WEIGHTS, WORDS, GenerateRequest, Task
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.parameters import MAX_INT32

MAX_PARAMETER_BYTES = 1 << 18  # each; the largest legal one needs some 40 KB
_TRACE_HEADERS = ("traceparent", "tracestate")  # that Triton or the gateway sends as parameters
_MAX_TRACEPARENT_CHARS = 128
Number = TypeVar("Number", bound=np.generic)
_LENGTH_BYTES = 4  # before each string of a STRING tensor
_MOST_SHOWN = 16  # tensors in a message
_OLDER_TYPES = {"TYPE_INT32": ("TYPE_UINT32",)}  # of inputs: clients of older ensembles send integers so


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    is_logprobs_null: bool = False  # answer null, as vLLM's backend does if only `return_logprobs` asks
    log_probs: bool = False  # cum_log_probs and output_log_probs, of the TensorRT-LLM ensemble
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    token_ids: bool = False
    perf_metrics: bool = False
    accumulate: bool = False  # each response holds all text so far
    is_trtllm: bool = False  # batch dimension, INT32 counts
    one_by_one: bool = False  # a response for each sequence, with its `sequence_index`


_FORMS = ("accumulate", "is_logprobs_null", "is_trtllm", "one_by_one")  # no input of their own names
RETURN_FLAGS = tuple(f"return_{field.name}" for field in fields(ResponseFormat) if field.name not in _FORMS)


class DeclaredSpec(NamedTuple):
    name: str
    data_type: str  # as in `config.pbtxt`
    dims: tuple[int, ...] = (1,)
    other_types: tuple[str, ...] = ()  # that an entry may declare


DeclaredSpecs = Mapping[str, Sequence[DeclaredSpec]]  # by "input" and "output"


def _specs(data_type: str, names: str, dims: tuple[int, ...] = (1,)) -> tuple[DeclaredSpec, ...]:
    return tuple(DeclaredSpec(name, data_type, dims) for name in names.split())


_TYPES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "integer": ("TYPE_INT32", (1,)), "number": ("TYPE_FP32", (1,)), "true or false": ("TYPE_BOOL", (1,)),
    "list of texts": ("TYPE_STRING", (-1,)), "list of token ids": ("TYPE_INT32", (-1,)),
    "object of token id to number": ("TYPE_STRING", (1,)),
}  # fmt: skip


def _parameter_specs() -> Iterator[DeclaredSpec]:
    for name, field in FIELDS.items():
        if field.parameter.is_tensor:
            data_type, dims = _TYPES[field.kind]
            if (field.parameter.high or 0) > MAX_INT32:
                data_type = "TYPE_UINT64"
            for each in (name, *field.parameter.tensor_aliases):
                yield DeclaredSpec(each, data_type, dims)


SAMPLING_INPUTS = (
    *_parameter_specs(),
    # of the TensorRT-LLM ensemble
    *_specs("TYPE_INT32", "beam_width"),
    *_specs("TYPE_FP32", "length_penalty"),
    *_specs("TYPE_STRING", WORDS, (-1,)),
    *_specs("TYPE_FP32", WEIGHTS, (-1,)),
    *_specs("TYPE_STRING", "guided_decoding_guide_type guided_decoding_guide"),
    *_specs("TYPE_BOOL", "return_context_logits return_generation_logits"),
    *_specs("TYPE_STRING", "image", (-1,)),
)
_SAMPLING_DIMS = {spec.name: spec.dims for spec in SAMPLING_INPUTS}
INPUTS = tuple(
    spec._replace(other_types=_OLDER_TYPES.get(spec.data_type, ()))
    for spec in (
        *_specs("TYPE_STRING", "text_input messages sampling_parameters task"),
        *_specs("TYPE_INT32", "input_ids", (-1,)),
        *_specs("TYPE_FP32", "audio", (-1,)),
        *_specs("TYPE_STRING", "audio_file"),
        *_specs("TYPE_BOOL", "stream exclude_input_in_output accumulate_tokens"),
        *_specs("TYPE_BOOL", " ".join(RETURN_FLAGS)),
        *SAMPLING_INPUTS,
    )
)
_COUNTS = "num_input_tokens num_output_tokens"
_COMMON_OUTPUTS = (
    *_specs("TYPE_STRING", "text_output finish_reason logprobs prompt_logprobs weights language", (-1,)),
    *_specs("TYPE_FP32", "cumulative_logprob cum_log_probs embedding audio_seconds", (-1,)),
    *_specs("TYPE_FP32", "output_log_probs", (-1, -1)),
    *_specs("TYPE_INT32", "token_ids kv_cache_reused_blocks kv_cache_alloc_new_blocks", (-1,)),
    *_specs("TYPE_INT32", "num_cached_tokens priority num_draft_tokens num_accepted_draft_tokens", (-1,)),
    *_specs("TYPE_INT64", "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns", (-1,)),
)
OUTPUTS = (*_COMMON_OUTPUTS, *_specs("TYPE_UINT32", _COUNTS, (-1,)))
TRTLLM_OUTPUTS = (
    *_COMMON_OUTPUTS,
    *_specs("TYPE_INT32", f"{_COUNTS} sequence_index kv_cache_alloc_total_blocks", (-1,)),
    *_specs("TYPE_INT32", "total_accepted_draft_tokens total_draft_tokens", (-1,)),
    *_specs("TYPE_FP32", "acceptance_rate", (-1,)),
)


def complete(config: Any) -> Any:
    """Add missing tensors to a `pb_utils.ModelConfig`. Raise `ConfigError` for contradictory fields."""
    entry = config.as_dict()
    for _, message in contradictions(entry):
        raise ConfigError(message)
    # With a batch dimension, above 0.
    config.set_max_batch_size(int(entry.get("max_batch_size", 0)) or int(_is_trtllm(entry)))
    return add_missing(config, _known(entry), optional={"optional": True}, decoupled=True)


def add_missing(config: Any, specs: DeclaredSpecs, *, optional: Mapping[str, bool], decoupled: bool) -> Any:
    """Add the specs of undeclared inputs (with the fields `optional`) and outputs, and a transaction policy."""
    entry = config.as_dict()
    for kind, add, others in (("input", config.add_input, optional), ("output", config.add_output, {})):
        declared = {tensor["name"] for tensor in entry[kind]}
        for spec in specs[kind]:
            if spec.name not in declared:
                add({"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims), **others})
    if "model_transaction_policy" not in entry:
        config.set_model_transaction_policy({"decoupled": decoupled})
    return config


def contradictions(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, message) of each field with which the model does not load."""
    size = int(entry.get("max_batch_size", 0))
    if size > 0 and not _is_trtllm(entry):
        yield (
            "max_batch_size",
            f"max_batch_size is {size}: leave it out; the engine batches all requests by itself. "
            "For clients that send a batch dimension, set io_dialect to trtllm",
        )
    yield from refused_tensors(entry, _known(entry))


def refused_tensors(entry: Mapping[str, Any], specs: DeclaredSpecs) -> Iterator[tuple[str, str]]:
    """Yield (path, message) of each tensor of an entry that the model does not have in this form."""
    for kind, known in specs.items():
        by_name = {spec.name: spec for spec in known}
        for tensor in entry[kind]:
            name = tensor["name"]
            if message := _refusal(tensor, by_name):
                yield f"{kind}.{name}", f"{kind} {name!r} of config.pbtxt {message}"


def _is_trtllm(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("parameters", {}).get("io_dialect", {}).get("string_value") == "trtllm")


def _known(entry: Mapping[str, Any]) -> DeclaredSpecs:
    return {"input": INPUTS, "output": TRTLLM_OUTPUTS if _is_trtllm(entry) else OUTPUTS}


def _refusal(tensor: Mapping[str, Any], known: Mapping[str, DeclaredSpec]) -> str:
    spec, dims = known.get(tensor["name"]), list(tensor["dims"])
    if spec is None:
        names = f", which has {', '.join(known)}" if len(known) <= _MOST_SHOWN else ""
        return f"is not in the model{names}: leave it out"
    is_right = all(one == other or -1 in (one, other) for one, other in zip(dims, spec.dims, strict=False))
    types = (spec.data_type, *spec.other_types)
    if tensor["data_type"] in types and len(dims) == len(spec.dims) and is_right:
        return ""
    return f"is {tensor['data_type']} {dims}: the model has {' or '.join(types)} {list(spec.dims)}"


def read_request(
    request: Any, settings: FrontendSettings, *, decoupled: bool, max_prompt_bytes: int, arrival_ns: int
) -> tuple[GenerateRequest, ResponseFormat]:
    """Convert a Triton request; also return its response format. Raise `InvalidRequest`."""
    inputs = {tensor.name(): tensor for tensor in request.inputs()}
    stream = _flag(inputs, "stream")
    if stream and not decoupled:
        raise InvalidRequest("stream is true, and this model answers once: use the decoupled model, or leave it out")
    # A rendered template is not echoed by default: the client did not write it.
    exclude_input = _flag(inputs, "exclude_input_in_output", default=stream or "messages" in inputs)
    is_trtllm = settings.io_dialect == "trtllm"
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
        input_ids=_numbers(inputs, "input_ids", np.int32, max_prompt_bytes),
        audio=_numbers(inputs, "audio", np.float32, max_prompt_bytes),
        audio_file=_bytes(inputs, "audio_file", max_prompt_bytes, "max_prompt_bytes"),
        messages=_bytes(inputs, "messages", max_prompt_bytes, "max_prompt_bytes"),
        parameters=parameters,
        stream=stream,
        echo=not exclude_input,
        arrival_ns=arrival_ns,
        traceparent=traceparent(request, settings),
        timeout_us=settings.timeout_us(request.timeout()),
    ), response_format


def _task(inputs: Mapping[str, Any]) -> Task:
    text = to_text("task", scalar(inputs["task"])) if "task" in inputs else "generate"
    if text not in get_args(Task):
        raise InvalidRequest(f"task is {show(text)}: it must be {', '.join(get_args(Task))}")
    return cast(Task, text)


def _parameters(request: Any, inputs: Mapping[str, Any], *, is_trtllm: bool) -> tuple[ParameterSource, ...]:
    tensors = {name: _parameter(inputs[name]) for name in inputs.keys() & _SAMPLING_DIMS.keys()}
    sources = (
        ParameterSource(origin="sampling_parameters", values=_json_parameters(inputs)),
        ParameterSource(origin="request parameter", values=request_parameters(request)),
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
    name = "sampling_parameters"
    return expect(name, parse_json(data, name), dict, "a JSON object") if data else {}


def request_parameters(request: Any) -> dict[str, object]:
    # A name after a NUL would replace a proxy's: Triton joins them.
    values = cast(dict[str, object], parse_json(request.parameters() or "{}", "parameters"))
    values.pop("id", None)  # of `/generate`
    for name in _TRACE_HEADERS:
        values.pop(name, None)
    return values


def traceparent(request: Any, settings: FrontendSettings) -> str:
    """Return the request's `traceparent`; empty if spans are not exported."""
    if not settings.otlp_traces_endpoint:
        return ""
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
    if _SAMPLING_DIMS[name] == (-1,):
        return [_to_python(name, item) for item in items]
    return parse_json(scalar(tensor), name) if name == "logit_bias" else _to_python(name, scalar(tensor))


def _to_python(name: str, item: Any) -> object:
    if isinstance(item, bytes):
        return to_text(name, item)
    if isinstance(item, np.int32) and item < -1:
        raise InvalidRequest(
            f"{name} arrived as {item}, and takes nothing below -1. Its tensor is INT32, to which Triton narrows "
            "larger numbers: send at most 2147483647"
        )
    return float(str(item)) if isinstance(item, np.float32) else item.item()  # 0.7, not 0.699999988


def scalar(tensor: Any) -> Any:
    array = tensor.as_numpy().reshape(-1)
    if array.size != 1:
        raise InvalidRequest(f"{tensor.name()} has {array.size} elements: it must have one")
    return array[0]


def _flag(inputs: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    return bool(scalar(inputs[name])) if name in inputs else default


def _bytes(inputs: Mapping[str, Any], name: str, limit: int, setting: str = "") -> bytes | None:
    if name not in inputs:
        return None
    value: bytes = scalar(inputs[name])
    check_size(name, len(value), limit, setting)
    return value


def _numbers(inputs: Mapping[str, Any], name: str, dtype: type[Number], limit: int) -> npt.NDArray[Number] | None:
    """Return a copy of a vector, whose memory Triton may free after `execute`."""
    if name not in inputs:
        return None
    values = inputs[name].as_numpy().reshape(-1)
    check_size(name, values.nbytes, limit, "max_prompt_bytes")
    return np.array(values, dtype=dtype)
