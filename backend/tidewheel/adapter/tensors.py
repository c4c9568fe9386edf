"""Tensors of Triton's vLLM backend and the TRT-LLM ensemble, with additions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from tidewheel.errors import ConfigError

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

SAMPLING_INPUTS = (
    *_specs("TYPE_INT32", "max_tokens min_tokens top_k logprobs n prompt_logprobs truncate_prompt_tokens"),
    *_specs("TYPE_FP32", "temperature top_p min_p repetition_penalty presence_penalty frequency_penalty"),
    *_specs("TYPE_UINT64", "seed"),
    *_specs("TYPE_STRING", "stop bad_words", (-1,)),
    *_specs("TYPE_STRING", "logit_bias"),
    *_specs("TYPE_INT32", "stop_token_ids allowed_token_ids", (-1,)),
    *_specs("TYPE_BOOL", "ignore_eos include_stop_str_in_output skip_special_tokens"),
    *_specs("TYPE_BOOL", "add_special_tokens add_generation_prompt return_token_strs echo"),
    # of the TensorRT-LLM ensemble
    *_specs("TYPE_INT32", "min_length end_id pad_id num_return_sequences beam_width"),
    *_specs("TYPE_FP32", "length_penalty"),
    *_specs("TYPE_UINT64", "random_seed"),
    *_specs("TYPE_STRING", "stop_words embedding_bias_words", (-1,)),
    *_specs("TYPE_FP32", "embedding_bias_weights", (-1,)),
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


def complete(config: Any) -> Any:
    """Add to a `pb_utils.ModelConfig` what the entry does not declare. Raise `ConfigError` for a contradiction."""
    entry = config.as_dict()
    is_trtllm = entry.get("parameters", {}).get("io_dialect", {}).get("string_value") == "trtllm"
    config.set_max_batch_size(_max_batch_size(entry, is_trtllm=is_trtllm))
    # The ensemble's integers were UINT32 in older releases: clients of that time send no others.
    replaceable = {"TYPE_INT32": "TYPE_UINT32"} if is_trtllm else {}
    for spec in _missing("input", INPUTS, entry["input"], replaceable):
        config.add_input({**_as_dict(spec), "optional": True})
    for spec in _missing("output", TRTLLM_OUTPUTS if is_trtllm else OUTPUTS, entry["output"], {}):
        config.add_output(_as_dict(spec))
    if "model_transaction_policy" not in entry:
        config.set_model_transaction_policy({"decoupled": True})
    return config


def _max_batch_size(entry: Mapping[str, Any], *, is_trtllm: bool) -> int:
    size = int(entry.get("max_batch_size", 0))
    if is_trtllm:
        return size or 1  # above 0, tensors have a batch dimension
    if size > 0:
        raise ConfigError(
            f"max_batch_size is {size}: leave it out; the engine batches all requests by itself. "
            "For clients that send a batch dimension, set io_dialect to trtllm"
        )
    return 0


def _as_dict(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)}


def _missing(
    kind: str,
    specs: Iterable[TensorSpec],
    declared: Iterable[Mapping[str, Any]],
    replaceable: Mapping[str, str],  # by type, one that may stand for it where a tensor has one element
) -> list[TensorSpec]:
    known = {spec.name: spec for spec in specs}
    for tensor in declared:
        spec = known.pop(tensor["name"], None)
        if spec is None:
            raise ConfigError(f"{kind} {tensor['name']!r} of config.pbtxt is unknown to this backend: leave it out")
        given, dims = tensor["data_type"], list(tensor["dims"])
        other = replaceable.get(spec.data_type, "") if spec.dims == (1,) else ""
        if given not in (spec.data_type, other):
            types = f"{spec.data_type} or {other}" if other else spec.data_type
            raise ConfigError(f"{kind} {spec.name!r} has data_type {given}: it must be {types}")
        if dims not in ([1], [-1], list(spec.dims)):
            raise ConfigError(f"{kind} {spec.name!r} has dims {dims}: they must be {list(spec.dims)}")
    return list(known.values())
