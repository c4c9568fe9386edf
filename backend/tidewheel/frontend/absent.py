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

ABSENT: dict[str, AbsentFeature] = {
    "beam_width": _NO_BEAMS,
    "num_beams": _NO_BEAMS,
    "use_beam_search": _NO_BEAMS,
    "beam_search_diversity_rate": AbsentFeature("beam search is not offered", (*_OFF, 0)),
    "length_penalty": _NO_PENALTY,
    "len_penalty": _NO_PENALTY,
    "early_stopping": _NO_BEAMS,
    "prompt_logprobs": _NO_PROMPT_LOGPROBS,
    "guided_json": _NO_STRUCTURE,
    "guided_regex": _NO_STRUCTURE,
    "guided_choice": _NO_STRUCTURE,
    "guided_grammar": _NO_STRUCTURE,
    "guided_json_object": _NO_STRUCTURE,
    "guided_decoding": _NO_STRUCTURE,
    "guided_decoding_backend": _NO_STRUCTURE,
    "guided_decoding_guide": _NO_STRUCTURE,
    "guided_decoding_guide_type": _NO_STRUCTURE,
    "guided_whitespace_pattern": _NO_STRUCTURE,
    "structured_outputs": _NO_STRUCTURE,
    "response_format": AbsentFeature("structured output is not offered", (*_OFF, {"type": "text"})),
    "logits_processors": AbsentFeature("code of clients is never run"),
    "allowed_token_ids": AbsentFeature("use logit_bias to steer away from tokens"),
    "truncate_prompt_tokens": AbsentFeature("prompts are never cut: send what fits the context"),
    "detokenize": AbsentFeature("text is always returned", (True,)),
    "spaces_between_special_tokens": AbsentFeature("special tokens are spaced as the tokenizer says", (True,)),
    "lora_name": _NO_LORA,
    "lora_task_id": _NO_LORA,
    "adapter_id": _NO_LORA,
    "top_p_min": _NO_TOP_P_DECAY,
    "top_p_decay": _NO_TOP_P_DECAY,
    "top_p_reset_ids": _NO_TOP_P_DECAY,
    "embedding_bias_words": AbsentFeature("use logit_bias, which takes token ids"),
    "embedding_bias_weights": AbsentFeature("use logit_bias, which takes token ids"),
    "prompt_embedding_table": _NO_TENSORS,
    "prompt_embeds": _NO_TENSORS,
    "image": _NO_TENSORS,
    "return_log_probs": AbsentFeature("ask for return_logprobs"),
    "return_context_logits": _NO_LOGITS,
    "return_generation_logits": _NO_LOGITS,
    "chat_template": _NO_TEMPLATES,
    "chat_template_kwargs": _NO_TEMPLATES,
    "add_generation_prompt": AbsentFeature("it is always added", (True,)),
    "continue_final_message": _NO_TEMPLATES,
    "documents": _NO_TEMPLATES,
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "timeout": AbsentFeature("it is a field of Triton's infer requests: set deadline_ms", (*_OFF, 0)),
    "typical_p": AbsentFeature("typical sampling is not offered", (1,)),
    "no_repeat_ngram_size": AbsentFeature("use repetition_penalty or frequency_penalty", (0,)),
    "do_sample": AbsentFeature("set temperature: 0 is greedy, above 0 samples", ()),
}
