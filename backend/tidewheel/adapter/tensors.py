"""Tensors of Triton's vLLM backend and the TRT-LLM ensemble, with additions."""

from __future__ import annotations

from typing import NamedTuple


class TensorSpec(NamedTuple):
    name: str
    data_type: str  # as in `config.pbtxt`
    dims: tuple[int, ...] = (1,)


PROMPT_INPUTS = (
    TensorSpec("text_input", "TYPE_STRING"),
    TensorSpec("input_ids", "TYPE_INT32", (-1,)),
    TensorSpec("messages", "TYPE_STRING"),
)

# Each asks for outputs beside `text_output`.
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

# The front end defines their meaning.
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
