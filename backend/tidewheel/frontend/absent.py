"""Parameters of other servers that are known here and not offered: refused by name, unless they ask for nothing."""

from __future__ import annotations

from typing import NamedTuple

_OFF: tuple[object, ...] = ("", False, [])


class AbsentFeature(NamedTuple):
    reason: str
    neutral: tuple[object, ...] = _OFF  # values that ask for nothing, beside null

    def is_neutral(self, value: object) -> bool:
        return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.neutral)


_NO_PENALTY = AbsentFeature("beam search is not offered, and without it the penalty means nothing", (0, 1, "1"))
_NO_BEAMS = AbsentFeature("beam search is not offered", (*_OFF, 1, "1"))
_NO_STRUCTURE = AbsentFeature("structured output is not offered")
_NO_PROMPT_LOGPROBS = AbsentFeature("log-probabilities of the prompt are not offered")
_NO_LORA = AbsentFeature("adapters are not offered", (*_OFF, 0))
_NO_TEMPLATES = AbsentFeature("the chat template is the model's, fixed when it is loaded")
_NO_TOOLS = AbsentFeature("tool calls are not offered", (*_OFF, "none"))
_NO_LOGITS = AbsentFeature("logits are not returned: ask for logprobs")
_NO_TENSORS = AbsentFeature("prompts are text or token ids")
_NO_TOP_P_DECAY = AbsentFeature("top_p is constant over a request")

_STRUCTURE = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "guided_decoding",
    "guided_decoding_backend", "guided_decoding_guide", "guided_decoding_guide_type",
    "guided_whitespace_pattern", "structured_outputs",
)  # fmt: skip

ABSENT: dict[str, AbsentFeature] = {
    **dict.fromkeys(("beam_width", "num_beams", "use_beam_search", "early_stopping"), _NO_BEAMS),
    **dict.fromkeys(("length_penalty", "len_penalty"), _NO_PENALTY),
    "prompt_logprobs": _NO_PROMPT_LOGPROBS,
    **dict.fromkeys(_STRUCTURE, _NO_STRUCTURE),
    **dict.fromkeys(("lora_name", "lora_task_id", "adapter_id"), _NO_LORA),
    **dict.fromkeys(("top_p_min", "top_p_decay", "top_p_reset_ids"), _NO_TOP_P_DECAY),
    **dict.fromkeys(("prompt_embedding_table", "prompt_embeds", "image"), _NO_TENSORS),
    **dict.fromkeys(("return_context_logits", "return_generation_logits"), _NO_LOGITS),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "continue_final_message", "documents"), _NO_TEMPLATES),
    **dict.fromkeys(("tools", "tool_choice"), _NO_TOOLS),
    "beam_search_diversity_rate": AbsentFeature("beam search is not offered", (*_OFF, 0)),
    "response_format": AbsentFeature("structured output is not offered", (*_OFF, {"type": "text"})),
    "logits_processors": AbsentFeature("code of clients is never run"),
    "allowed_token_ids": AbsentFeature("use logit_bias to steer away from tokens"),
    "truncate_prompt_tokens": AbsentFeature("prompts are never cut: send what fits the context"),
    "detokenize": AbsentFeature("text is always returned", (True,)),
    "spaces_between_special_tokens": AbsentFeature("special tokens are spaced as the tokenizer says", (True,)),
    "embedding_bias_words": AbsentFeature("use logit_bias, which takes token ids"),
    "embedding_bias_weights": AbsentFeature("use logit_bias, which takes token ids"),
    "return_log_probs": AbsentFeature("ask for return_logprobs"),
    "add_generation_prompt": AbsentFeature("it is always added", (True,)),
    "timeout": AbsentFeature("it is a field of Triton's infer requests: set deadline_ms", (*_OFF, 0)),
    "typical_p": AbsentFeature("typical sampling is not offered", (1,)),
    "no_repeat_ngram_size": AbsentFeature("use repetition_penalty or frequency_penalty", (0,)),
    "do_sample": AbsentFeature("set temperature: 0 is greedy, above 0 samples", ()),
}
