"""Chat templates in the shapes of models in use, each with the special tokens that it writes."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    source: str
    special: tuple[str, ...]  # the first begins a text, the second ends one, where a template says so


_GENERATE = "{% if add_generation_prompt %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + _GENERATE
    + "<|im_start|>assistant\n{% endif %}"
)
SHAPES = {
    "ChatML": Shape(CHATML, ("<|im_start|>", "<|im_end|>")),
    "SmolLM2": Shape(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML,
        ("<|im_start|>", "<|im_end|>"),
    ),
    "Llama 3": Shape(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        + _GENERATE
        + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "Mistral": Shape(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
        "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
    ),
    "Qwen 3": Shape(
        "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
        "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content.strip('\\n') }}\n</think>\n\n{% endif %}"
        "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}<|im_end|>\n{% endfor %}" + _GENERATE + "<|im_start|>assistant\n"
        "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ),
    "Gemma": Shape(
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}" + _GENERATE + "<start_of_turn>model\n{% endif %}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    ),
    "Phi": Shape(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        + _GENERATE
        + "<|assistant|>\n{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "DeepSeek": Shape(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "<\uff5cUser\uff5c>{{ m.content }}{% else %}<\uff5cAssistant\uff5c>{{ m.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}" + _GENERATE + "<\uff5cAssistant\uff5c>{% endif %}",
        ("<\uff5cbegin\uff5c>", "<\uff5cend\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
    ),
    "Hermes": Shape(
        "{{ bos_token }}{% if tools %}<|im_start|>system\n<tools>{{ tools | tojson(indent=2) }}</tools><|im_end|>\n"
        "{% endif %}" + CHATML,
        ("<|begin_of_text|>", "<|im_start|>", "<|im_end|>"),
    ),
    "Zephyr": Shape(  # its roles are plain text
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        + _GENERATE
        + "<|assistant|>{% endif %}",
        ("<s>", "</s>"),
    ),
    "Command R": Shape(
        "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|><|"
        "{{ {'user': 'USER', 'assistant': 'CHATBOT'}.get(m.role, 'USER') }}_TOKEN|>{{ m.content.strip() }}"
        "<|END_OF_TURN_TOKEN|>{% endfor %}" + _GENERATE + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
        ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    ),
    "GPT-OSS": Shape(
        "<|start|>system<|message|>{{ instructions | default('You help.') }}<|end|>{% for m in messages %}<|start|>"
        "{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}" + _GENERATE + "<|start|>assistant{% endif %}",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
    ),
}
