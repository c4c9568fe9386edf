from __future__ import annotations

from typing import NamedTuple

from tidewheel.errors import InvalidRequest
from tidewheel.frontend import coercion
from tidewheel.frontend.coercion import Coercion
from tidewheel.frontend.grammar_parameters import GRAMMAR_PARAMETERS
from tidewheel.frontend.prompt_options import PromptOptions
from tidewheel.frontend.word_biases import WEIGHTS, WORDS
from tidewheel.grammar import Grammar
from tidewheel.request import Priority

_OFF: tuple[object, ...] = ("", False, [])


def _to_priority(name: str, value: object) -> Priority:
    number = coercion.to_int(name, value)
    try:
        return Priority.from_wire(number)
    except ValueError:
        raise InvalidRequest(f"{name} is {number}: it must be 0 (default) to {max(Priority)} (lowest)") from None


def _to_seed(name: str, value: object) -> int | None:
    """Return None for -1, which asks for a seed of the engine's, as in vLLM."""
    seed = coercion.to_int(name, value)
    return None if seed == -1 else seed


def _to_allowed(name: str, value: object) -> tuple[int, ...]:
    allowed = coercion.to_ints(name, value)
    if not allowed:
        raise InvalidRequest(f"{name} is empty, which allows no token: name some, or leave it out")
    return allowed


def _to_grammar(name: str, value: object) -> Grammar:
    if not isinstance(value, Grammar):
        raise InvalidRequest(f"{name} is {coercion.show(value)}: send guided_grammar or structured_outputs")
    return value


OPTIONS: dict[str, Coercion] = {
    "n": coercion.to_int,
    "priority": _to_priority,
    **dict.fromkeys(("tenant", "cache_salt", "session_id"), coercion.to_text),
    **dict.fromkeys(("deadline_ms", "soft_deadline_ms", "session_ttl_s"), coercion.to_float),
    "close_session": coercion.to_bool,
}
PROMPT_OPTIONS = dict.fromkeys(PromptOptions._fields, coercion.to_bool)
COERCIONS: dict[str, Coercion] = {
    **OPTIONS,
    **PROMPT_OPTIONS,
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs"), coercion.to_int),
    "seed": _to_seed,
    **dict.fromkeys(("temperature", "top_p", "min_p"), coercion.to_float),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), coercion.to_float),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"), coercion.to_bool),
    **dict.fromkeys(("stop", "bad_words"), coercion.to_texts),
    "stop_token_ids": coercion.to_ints,
    "allowed_token_ids": _to_allowed,
    "truncate_prompt_tokens": coercion.to_int,
    "logit_bias": coercion.to_bias,
    "best_of": coercion.to_int,
    "grammar": _to_grammar,
    "end_id": coercion.to_int,  # an additional stop token
    "pad_id": coercion.to_int,  # ignored
}
ALIASES = {
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_length": "min_tokens",
    "stop_words": "stop",
    "random_seed": "seed",
    # of the model inside the TensorRT-LLM ensemble
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
}


class AbsentFeature(NamedTuple):
    """Parameter that is refused, unless its value requests nothing."""

    reason: str
    neutral: tuple[object, ...] = _OFF  # beside null
    is_whole: bool = False  # the reason is all of the message, which clients of Triton's vLLM backend compare

    def is_neutral(self, value: object) -> bool:
        return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.neutral)


def _each(names: str, reason: str, neutral: tuple[object, ...] = _OFF) -> dict[str, AbsentFeature]:
    return dict.fromkeys(names.split(), AbsentFeature(reason, neutral))


ABSENT: dict[str, AbsentFeature] = {
    **_each("beam_width num_beams use_beam_search early_stopping", "beam search is not offered", (*_OFF, 1, "1")),
    **_each("length_penalty len_penalty", "beam search is not offered, and only it uses the penalty", (0, 1, "1")),
    "lora_name": AbsentFeature("LoRA feature is not enabled.", is_whole=True),
    **_each("lora_task_id lora_weights lora_config adapter_id", "adapters are not offered", (*_OFF, 0)),
    **_each("top_p_min top_p_decay top_p_reset_ids", "top_p is constant over a request"),
    **_each("runtime_top_p_min runtime_top_p_decay runtime_top_p_reset_ids", "top_p is constant over a request"),
    **_each("prompt_embedding_table prompt_vocab_size prompt_table_extra_id", "prompts are text or token ids"),
    **_each("prompt_embeds decoder_text_input", "prompts are text or token ids"),
    **_each(
        "image images image_input image_bytes_input image_url_input video_bytes_input",
        "images are not offered: prompts are text or token ids",
    ),
    **_each("num_draft_tokens use_draft_logits draft_input_ids", "drafts are not offered", (*_OFF, 0)),
    **_each("return_context_logits return_generation_logits", "logits are not returned: ask for logprobs"),
    **_each("chat_template continue_final_message documents", "the template is the model's own"),
    **_each("tools chat_template_kwargs", "send it inside messages: an object with messages and tools"),
    **_each("tool_choice functions function_call", "tools stand inside messages", (*_OFF, "none")),
    **_each("parallel_tool_calls", "tools stand inside messages", (*_OFF, True)),
    "max_request_s": AbsentFeature("it is a setting of the entry; a request sets deadline_ms", ()),
    "default_max_tokens": AbsentFeature("it is a setting of the entry; a request sets max_tokens", ()),
    # Names of OpenAI's API.
    **_each(
        "metadata store service_tier reasoning_effort verbosity modalities audio prediction safety_identifier "
        "prompt_cache_key prompt_cache_retention web_search_options",
        "it is an option of OpenAI's service: leave it out",
        (*_OFF, {}, "auto", "default", ["text"]),
    ),
    "model": AbsentFeature("the address of the request names the model: leave it out"),
    "user": AbsentFeature("there are no users: use tenant, which rates and quotas are for, or leave it out"),
    "prompt": AbsentFeature("the prompt is text_input"),
    "suffix": AbsentFeature("text goes on at the end of the prompt only"),
    "stream_options": AbsentFeature("set return_num_input_tokens and return_num_output_tokens"),
    "top_logprobs": AbsentFeature("set logprobs to the number", (*_OFF, 0)),
    "embedding_request": AbsentFeature("set the input task to embed"),
    "beam_search_diversity_rate": AbsentFeature("beam search is not offered", (*_OFF, 0)),
    "logits_processors": AbsentFeature("code of clients is never run"),
    "detokenize": AbsentFeature("text is always returned", (True,)),
    "spaces_between_special_tokens": AbsentFeature("special tokens are spaced as the tokenizer says", (True,)),
    "return_log_probs": AbsentFeature("it is an input of its own: send it beside text_input"),
    "timeout": AbsentFeature("Triton's timeout is a field of /infer and gRPC: set deadline_ms", (*_OFF, 0)),
    "typical_p": AbsentFeature("typical sampling is not offered", (1,)),
    "no_repeat_ngram_size": AbsentFeature("use repetition_penalty or frequency_penalty", (0,)),
    "do_sample": AbsentFeature("set temperature: 0 is greedy, above 0 samples", ()),
}

SUGGESTED = (*COERCIONS, *ALIASES, WORDS, WEIGHTS, *GRAMMAR_PARAMETERS)
