"""Tensors of Triton's vLLM backend and the TRT-LLM ensemble, with additions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tidewheel.errors import ConfigError


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
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_token_ids",
    "return_perf_metrics",
)

SAMPLING_INPUTS = (
    *_specs("TYPE_INT32", "max_tokens min_length min_tokens end_id top_k"),
    *_specs("TYPE_FP32", "temperature top_p repetition_penalty presence_penalty frequency_penalty"),
    *_specs("TYPE_UINT64", "seed"),
    *_specs("TYPE_STRING", "stop_words bad_words stop", (-1,)),
    *_specs("TYPE_BOOL", "ignore_eos"),
    *_specs("TYPE_STRING", "guided_decoding_guide_type guided_decoding_guide"),
    *_specs("TYPE_STRING", "image", (-1,)),
)
INPUTS = (
    *_specs("TYPE_STRING", "text_input messages sampling_parameters"),
    *_specs("TYPE_INT32", "input_ids", (-1,)),
    *_specs("TYPE_BOOL", "stream exclude_input_in_output accumulate_tokens"),
    *_specs("TYPE_BOOL", " ".join(RETURN_FLAGS)),
    *SAMPLING_INPUTS,
)
OUTPUTS = (
    *_specs("TYPE_STRING", "text_output finish_reason logprobs", (-1,)),
    *_specs("TYPE_FP32", "cumulative_logprob", (-1,)),
    *_specs("TYPE_UINT32", "num_input_tokens num_output_tokens", (-1,)),
    *_specs("TYPE_INT32", "token_ids kv_cache_reused_blocks kv_cache_alloc_new_blocks priority", (-1,)),
    *_specs("TYPE_INT64", "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns", (-1,)),
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
            raise ConfigError(f"{kind} {tensor['name']!r} of config.pbtxt is unknown to this backend: leave it out")
        given, dims = tensor["data_type"], list(tensor["dims"])
        if given != spec.data_type:
            raise ConfigError(f"{kind} {spec.name!r} has data_type {given}: it must be {spec.data_type}")
        if dims not in ([1], [-1]):
            raise ConfigError(f"{kind} {spec.name!r} has dims {dims}: they must be {list(spec.dims)}")
    return list(known.values())
