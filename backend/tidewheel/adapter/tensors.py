"""Tensors of Triton's vLLM backend and the TRT-LLM ensemble, with additions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from tidewheel.errors import ConfigError
from tidewheel.frontend.request_parameters import FIELDS, WEIGHTS, WORDS
from tidewheel.parameters import MAX_INT32

IoDialect = Literal["vllm", "trtllm"]


class TensorSpec(NamedTuple):
    name: str
    data_type: str  # as in `config.pbtxt`
    dims: tuple[int, ...] = (1,)


def _specs(data_type: str, names: str, dims: tuple[int, ...] = (1,)) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, data_type, dims) for name in names.split())


RETURN_FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_log_probs",  # of the TensorRT-LLM ensemble
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_token_ids",
    "return_perf_metrics",
)

_TYPES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "integer": ("TYPE_INT32", (1,)), "number": ("TYPE_FP32", (1,)), "true or false": ("TYPE_BOOL", (1,)),
    "list of texts": ("TYPE_STRING", (-1,)), "list of token ids": ("TYPE_INT32", (-1,)),
    "object of token id to number": ("TYPE_STRING", (1,)),
}  # fmt: skip


def _parameter_specs() -> Iterator[TensorSpec]:
    for name, field in FIELDS.items():
        if field.parameter.is_tensor:
            data_type, dims = _TYPES[field.kind]
            if (field.parameter.high or 0) > MAX_INT32:
                data_type = "TYPE_UINT64"
            for each in (name, *field.parameter.tensor_aliases):
                yield TensorSpec(each, data_type, dims)


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
INPUTS = (
    *_specs("TYPE_STRING", "text_input messages sampling_parameters task"),
    *_specs("TYPE_INT32", "input_ids", (-1,)),
    *_specs("TYPE_BOOL", "stream exclude_input_in_output accumulate_tokens"),
    *_specs("TYPE_BOOL", " ".join(RETURN_FLAGS)),
    *SAMPLING_INPUTS,
)
_COUNTS = "num_input_tokens num_output_tokens"
_COMMON_OUTPUTS = (
    *_specs("TYPE_STRING", "text_output finish_reason logprobs prompt_logprobs", (-1,)),
    *_specs("TYPE_FP32", "cumulative_logprob cum_log_probs embedding", (-1,)),
    *_specs("TYPE_FP32", "output_log_probs", (-1, -1)),
    *_specs("TYPE_INT32", "token_ids kv_cache_reused_blocks kv_cache_alloc_new_blocks", (-1,)),
    *_specs("TYPE_INT32", "num_cached_tokens priority", (-1,)),
    *_specs("TYPE_INT64", "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns", (-1,)),
)
OUTPUTS = (*_COMMON_OUTPUTS, *_specs("TYPE_UINT32", _COUNTS, (-1,)))
TRTLLM_OUTPUTS = (
    *_COMMON_OUTPUTS,
    *_specs("TYPE_INT32", f"{_COUNTS} sequence_index kv_cache_alloc_total_blocks", (-1,)),
    *_specs("TYPE_INT32", "total_accepted_draft_tokens total_draft_tokens", (-1,)),
    *_specs("TYPE_FP32", "acceptance_rate", (-1,)),
)


# Clients of older releases of the ensemble send integers as UINT32.
_OLDER_TYPES = {"TYPE_INT32": "TYPE_UINT32"}


def complete(config: Any) -> Any:
    """Complete a `pb_utils.ModelConfig`. Raise `ConfigError` for a contradiction."""
    entry = config.as_dict()
    for _, message in contradictions(entry):
        raise ConfigError(message)
    is_trtllm = _is_trtllm(entry)
    config.set_max_batch_size(
        int(entry.get("max_batch_size", 0)) or int(is_trtllm)
    )  # with a batch dimension, above 0
    for kind, specs in _known(is_trtllm=is_trtllm).items():
        declared = {tensor["name"] for tensor in entry[kind]}
        for spec in specs:
            tensor = {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)}
            if spec.name not in declared and kind == "input":
                config.add_input({**tensor, "optional": True})
            elif spec.name not in declared:
                config.add_output(tensor)
    if "model_transaction_policy" not in entry:
        config.set_model_transaction_policy({"decoupled": True})
    return config


def contradictions(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield path and message of the fields that the load refuses."""
    is_trtllm, size = _is_trtllm(entry), int(entry.get("max_batch_size", 0))
    if size > 0 and not is_trtllm:
        yield (
            "max_batch_size",
            f"max_batch_size is {size}: leave it out; the engine batches all requests by itself. "
            "For clients that send a batch dimension, set io_dialect to trtllm",
        )
    for kind, specs in _known(is_trtllm=is_trtllm).items():
        known = {spec.name: spec for spec in specs}
        for tensor in entry[kind]:
            spec = known.pop(tensor["name"], None)
            has_older_type = is_trtllm and kind == "input" and spec is not None and spec.dims == (1,)
            if message := _refusal(kind, tensor, spec, _OLDER_TYPES if has_older_type else {}):
                yield f"{kind}.{tensor['name']}", message


def _is_trtllm(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("parameters", {}).get("io_dialect", {}).get("string_value") == "trtllm")


def _known(*, is_trtllm: bool) -> dict[str, tuple[TensorSpec, ...]]:
    return {"input": INPUTS, "output": TRTLLM_OUTPUTS if is_trtllm else OUTPUTS}


def _refusal(kind: str, tensor: Mapping[str, Any], spec: TensorSpec | None, other_types: Mapping[str, str]) -> str:
    if spec is None:
        return f"{kind} {tensor['name']!r} of config.pbtxt is unknown to this backend: leave it out"
    given, dims = tensor["data_type"], list(tensor["dims"])
    types = [spec.data_type, *filter(None, [other_types.get(spec.data_type)])]
    if given not in types:
        return f"{kind} {spec.name!r} has data_type {given}: it must be {' or '.join(types)}"
    if dims not in ([1], [-1], list(spec.dims)):
        return f"{kind} {spec.name!r} has dims {dims}: they must be {list(spec.dims)}"
    return ""
