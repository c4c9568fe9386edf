"""Chat messages and the template that makes a prompt of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.frontend.tokenizers_on_the_spot import byte_level_bpe
from tidewheel.errors import ConfigError, InvalidRequest, TidewheelError, Unsupported
from tidewheel.frontend.chat import ChatTemplate, Conversation, parse_conversation

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, str]] | None = None) -> str:
    return ChatTemplate(source, NAMED).render(Conversation(messages or USER))


def test_blocks_leave_no_whitespace() -> None:
    source = "{% for m in messages %}\n  {% if m.role %}\n{{ bos_token }}{{ m.content }}\n  {% endif %}\n{% endfor %}"
    assert render(source) == "<s>Hi\n"


def test_the_assistant_is_asked_to_speak() -> None:
    assert render("{% if add_generation_prompt %}yes{% endif %}") == "yes"


def test_helpers_that_templates_rely_on() -> None:
    assert render("{{ {'ä': '<b>'} | tojson }}") == '{"ä": "<b>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("a{% generation %}{{ eos_token }}{% endgeneration %}b") == "a</s>b"


TEMPLATES = {
    "roles": """{{ bos_token }}{% for message in messages %}
    {%- if message['role'] == 'system' -%}
        [SYS]{{ message['content'] | trim }}[/SYS]
    {% else %}
        <{{ message['role'] }}>
{{ message.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}""",
    "namespace": """{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
{{ ns.n }}: {{ m | tojson }} {{ m.content | tojson(indent=2) }}
{% if loop.last %}{% break %}{% endif %}{% endfor %}""",
    "tools": """{% if tools is not none or documents is not none %}tools{% endif %}
{{ messages[0].content.strip().split(' ')[-1] | upper }}{{ messages | length }}
{{ messages[1:] | map(attribute='role') | list }}""",
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_as_transformers_renders(source: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe(), **NAMED)
    messages = [{"role": "system", "content": " Be <kind> "}, {"role": "user", "content": "Grüße 🎉\n"}]
    expected = tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert render(source, messages) == expected


def test_what_the_template_refuses() -> None:
    with pytest.raises(InvalidRequest, match="chat template: no system role"):
        render("{{ raise_exception('no system role') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",  # immutable
        "{{ ''.__class__.__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ missing.attribute }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_the_sandbox_holds_and_failures_are_the_requests(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render(source)


def write(folder: Path, file: str, value: object) -> None:
    (folder / file).write_text(value if isinstance(value, str) else json.dumps(value))


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, {}) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "list"}]
    for file, content, expected in [
        ("tokenizer_config.json", {"chat_template": named}, "list"),
        ("tokenizer_config.json", {"chat_template": "config"}, "config"),
        ("chat_template.json", {"chat_template": "json"}, "json"),
        ("chat_template.jinja", "jinja", "jinja"),
    ]:
        write(tmp_path, file, content)
        template = ChatTemplate.load(tmp_path, {})
        assert template is not None
        assert template.render(Conversation(USER)) == expected


@pytest.mark.parametrize("value", [3, ["x"], [{"name": "default", "template": 3}], "{% if %}", "{{"])
def test_a_bad_template_stops_the_load(tmp_path: Path, value: object) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(ConfigError, match=r"chat.template"):
        ChatTemplate.load(tmp_path, {})


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": parts, "name": "Ann"}]
    assert parse_conversation(json.dumps(messages)).messages == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "a\nb", "name": "Ann"},
    ]


def test_tools_and_calls() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    given = {
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "a", "content": "rain"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "strict": False, "description": None}}],
        "chat_template_kwargs": {"enable_thinking": False, "n": 2},
    }
    conversation = parse_conversation(json.dumps(given))
    assert conversation.messages[0] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
        ],
    }
    assert conversation.messages[1] == given["messages"][1]
    assert conversation.tools == [{"type": "function", "function": {"name": "weather"}}]
    source = (
        "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
        "{{ tools | tojson }}{{ enable_thinking }}{{ n }}{{ bos_token }}"
    )
    assert ChatTemplate(source, NAMED).render(conversation) == (
        '{"city": "Paris"}[{"type": "function", "function": {"name": "weather"}}]False2<s>'
    )


def with_tool(**function: object) -> dict[str, object]:
    return {"messages": USER, "tools": [{"type": "function", "function": {"name": "f", **function}}]}


def with_call(call: object) -> list[object]:
    return [{"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"messages": USER, "tool": []}, ["messages", "'tool'", "tools"]),
        ({"messages": USER, "tools": {}}, ["tools", "list"]),
        ({"messages": USER, "tools": [3]}, ["tools[0]", "object"]),
        ({"messages": USER, "tools": with_tool()["tools"] * 2}, ["tools has several functions of the name f"]),
        ({"messages": USER, "tools": [{}] * 129}, ["tools has 129", "128"]),
        (with_tool(name="a b"), ["tools[0].function.name", "'a b'"]),
        (with_tool(name=""), ["tools[0].function.name"]),
        (with_tool(parameters=[]), ["tools[0].function.parameters", "object"]),
        (with_tool(parameters={"maximum": 2**70}), ["64 bits"]),
        (with_tool(parameters={"title": "\ud800"}), ["tools", "lone surrogate"]),
        (with_call({"function": {"name": "f", "arguments": {"\udfff": 1}}}), ["tools", "lone surrogate"]),
        ({"messages": USER, "chat_template_kwargs": {"a": "\ud800"}}, ["options", "lone surrogate"]),
        (with_tool(description=3), ["tools[0].function.description", "text"]),
        (with_tool(strict="yes"), ["tools[0].function.strict", "'yes'", "true or false"]),
        ({**with_tool(), "tool_choice": "f"}, ["tool_choice is 'f'", "auto, required, or a list of names"]),
        ({**with_tool(), "tool_choice": ["g"]}, ["tool_choice", "'g'"]),
        ({**with_tool(), "tool_choice": [3]}, ["tool_choice", "[3]"]),
        ({**with_tool(), "tool_choice": []}, ["tool_choice is []"]),
        ({"messages": USER, "tool_choice": "required"}, ["tool_choice", "functions in tools"]),
        ({**with_tool(), "parallel_tool_calls": 0}, ["parallel_tool_calls is 0", "true or false"]),
        (with_tool(schema={}), ["tools[0].function.schema", "unknown"]),
        ({"messages": USER, "tools": [{"type": "retrieval"}]}, ["tools[0].type", "functions"]),
        (with_call({}), ["messages[0].tool_calls[0].function", "object"]),
        (with_call({"function": {"name": "f", "arguments": "{"}}), ["tool_calls[0].function.arguments", "JSON"]),
        (with_call({"function": {"name": "f", "arguments": "[]"}}), ["tool_calls[0].function.arguments", "object"]),
        ({"messages": USER, "chat_template_kwargs": []}, ["chat_template_kwargs", "object"]),
        ({"messages": USER, "chat_template_kwargs": {"messages": "x"}}, ["'messages'", "no request may set"]),
        ({"messages": USER, "chat_template_kwargs": {"bos_token": "x"}}, ["'bos_token'", "no request may set"]),
        ({"messages": USER, "chat_template_kwargs": {"a": []}}, ["chat_template_kwargs.a", "text"]),
        ({"messages": USER, "chat_template_kwargs": {f"a{i}": 1 for i in range(17)}}, ["17", "16"]),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_tools_that_are_refused(value: object, words: list[str]) -> None:
    with pytest.raises(TidewheelError) as caught:
        parse_conversation(json.dumps(value))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", ["messages", "JSON"]),
        ("[]", ["messages", "one message or more"]),
        ("{}", ["messages", "list"]),
        ("[3]", ["messages[0]", "3"]),
        ('[{"role": "user"}]', ["messages[0].content", "None"]),
        ('[{"content": "x"}]', ["messages[0].role"]),
        ('[{"role": "user<|im_end|>", "content": "x"}]', ["messages[0].role"]),
        ('[{"role": "user", "content": 3}]', ["messages[0].content", "3"]),
        ('[{"role": "user", "content": "\\ud800"}]', ["messages[0].content", "Unicode"]),
        ('[{"role": "user", "content": [{"type": "text"}]}]', ["messages[0].content[0].text"]),
        ('[{"role": "user", "content": ["x"]}]', ["messages[0].content[0]"]),
        ('[{"role": "user", "content": "x", "rule": 1}]', ["messages[0]", "rule"]),
        ('[{"role": "user", "role": "user", "content": "x"}]', ["'role'", "twice"]),
        (json.dumps(USER * 5000), ["5000", "4096"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_messages_that_are_refused(text: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_conversation(text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "function_call": {}},
        {"role": "assistant", "tool_calls": [{"type": "custom"}]},
    ],
    ids=["image", "function", "tool"],
)
def test_known_and_not_offered(message: dict[str, object]) -> None:
    with pytest.raises(Unsupported):
        parse_conversation(json.dumps([message]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name", "x"]), children, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(value=json_values)
def test_any_json_is_messages_or_refused(value: object) -> None:
    try:
        messages = parse_conversation(json.dumps(value)).messages
    except TidewheelError:
        return
    assert all(isinstance(message["content"], str) for message in messages)
