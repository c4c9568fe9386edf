"""Tensors of Triton's vLLM backend and the TRT-LLM ensemble, with additions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tidewheel.errors import ConfigError


class TensorSpec(NamedTuple):
    name: str
    data_type: str  # as in `config.pbtxt`
    dims: tuple[int, ...] = (1,)


PROMPT_INPUTS = (
    TensorSpec("text_input", "TYPE_STRING"),
    TensorSpec("input_ids", "TYPE_INT32", (-1,)),
    TensorSpec("messages", "TYPE_STRING"),
)

RETURN_FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_token_ids",
    "return_perf_metrics",
)

CONTROL_INPUTS = (
    TensorSpec("stream", "TYPE_BOOL"),
    TensorSpec("sampling_parameters", "TYPE_STRING"),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL"),
    TensorSpec("accumulate_tokens", "TYPE_BOOL"),
    *(TensorSpec(name, "TYPE_BOOL") for name in RETURN_FLAGS),
)

SAMPLING_INPUTS = (
    TensorSpec("max_tokens", "TYPE_INT32"),
    TensorSpec("min_length", "TYPE_INT32"),
    TensorSpec("min_tokens", "TYPE_INT32"),
    TensorSpec("end_id", "TYPE_INT32"),
    TensorSpec("top_k", "TYPE_INT32"),
    TensorSpec("temperature", "TYPE_FP32"),
    TensorSpec("top_p", "TYPE_FP32"),
    TensorSpec("repetition_penalty", "TYPE_FP32"),
    TensorSpec("presence_penalty", "TYPE_FP32"),
    TensorSpec("frequency_penalty", "TYPE_FP32"),
    TensorSpec("seed", "TYPE_UINT64"),
    TensorSpec("stop_words", "TYPE_STRING", (-1,)),
    TensorSpec("bad_words", "TYPE_STRING", (-1,)),
    TensorSpec("stop", "TYPE_STRING", (-1,)),
    TensorSpec("ignore_eos", "TYPE_BOOL"),
    TensorSpec("guided_decoding_guide_type", "TYPE_STRING"),
    TensorSpec("guided_decoding_guide", "TYPE_STRING"),
)

INPUTS = (*PROMPT_INPUTS, *CONTROL_INPUTS, *SAMPLING_INPUTS)

OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", (-1,)),
    TensorSpec("finish_reason", "TYPE_STRING", (-1,)),
    TensorSpec("cumulative_logprob", "TYPE_FP32", (-1,)),
    TensorSpec("logprobs", "TYPE_STRING", (-1,)),
    TensorSpec("num_input_tokens", "TYPE_UINT32", (-1,)),
    TensorSpec("num_output_tokens", "TYPE_UINT32", (-1,)),
    TensorSpec("token_ids", "TYPE_INT32", (-1,)),
    TensorSpec("arrival_time_ns", "TYPE_INT64", (-1,)),
    TensorSpec("first_scheduled_time_ns", "TYPE_INT64", (-1,)),
    TensorSpec("first_token_time_ns", "TYPE_INT64", (-1,)),
    TensorSpec("last_token_time_ns", "TYPE_INT64", (-1,)),
    TensorSpec("kv_cache_reused_blocks", "TYPE_INT32", (-1,)),
    TensorSpec("kv_cache_alloc_new_blocks", "TYPE_INT32", (-1,)),
    TensorSpec("priority", "TYPE_INT32", (-1,)),
)


def complete(config: Any) -> Any:
    """Add to a `pb_utils.ModelConfig` what the entry does not declare. Raise `ConfigError` for a contradiction."""
    entry = config.as_dict()
    if entry.get("max_batch_size", 0) > 0:
        raise ConfigError(
            f"max_batch_size is {entry['max_batch_size']}: leave it out; the engine batches all requests by itself"
        )
    config.set_max_batch_size(0)
    for spec in _missing("input", INPUTS, entry["input"]):
        config.add_input({**_as_dict(spec), "optional": True})
    for spec in _missing("output", OUTPUTS, entry["output"]):
        config.add_output(_as_dict(spec))
    if "model_transaction_policy" not in entry:
        config.set_model_transaction_policy({"decoupled": True})
    return config


def _as_dict(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)}


def _missing(kind: str, specs: Iterable[TensorSpec], declared: Iterable[Mapping[str, Any]]) -> list[TensorSpec]:
    known = {spec.name: spec for spec in specs}
    for tensor in declared:
        spec = known.pop(tensor["name"], None)
        if spec is None:
            raise ConfigError(f"{kind} {tensor['name']!r} of config.pbtxt is none of this backend's: leave it out")
        given, dims = tensor["data_type"], list(tensor["dims"])
        if given != spec.data_type:
            raise ConfigError(f"{kind} {spec.name!r} has data_type {given}: it must be {spec.data_type}")
        if dims not in ([1], [-1]):
            raise ConfigError(f"{kind} {spec.name!r} has dims {dims}: they must be {list(spec.dims)}")
    return list(known.values())
