"""Calls between tags: arguments that become JSON while they arrive, and that templates write back."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest

from gateway.test_output_parser import pieces_of
from tidewheel.gateway.output_parser import ExpectedCalls, Functions, OutputParser, ParsedOutput

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "deep": {"$ref": "#/$defs/deep"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "size": {"type": ["string", "integer"]},
    "flag": {"type": "boolean"},
}
FUNCTIONS: Functions = {
    "f": {"parameters": {"properties": PROPERTIES, "$defs": {"deep": {"type": "object"}}}},
    "g": {"parameters": "malformed"},
}
# As the models' templates write calls; older ones of Qwen3-Coder write numbers and booleans as Python does.
GLM = """<tool_call>{{ name }}
{% for key, value in arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>"""
QWEN = """<tool_call>
<function={{ name }}>
{% for key, value in arguments.items() %}<parameter={{ key }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>"""
TEMPLATES = {"glm": GLM, "glm, together": GLM.replace("\n", ""), "qwen3-coder": QWEN}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"text": 'a "b"\n\\ <tool_call> </function> é🎉'},
    {"text": "", "count": -3, "deep": {"a": ["b", None, "</tool_call>"]}},
    {"text": "\n\n x \n", "maybe": None, "flag": True},
    {"maybe": "None of them", "size": 12, "flag": False},
    {"size": "12 m", "maybe": '"', "text": "12"},
    {"unknown": [1], "another": "a", "text": "null"},
]


def written(template: str, name: str, arguments: dict[str, Any]) -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = json.dumps
    return environment.from_string(TEMPLATES[template]).render(name=name, arguments=arguments)


def parse(pieces: list[str], *, must_call: bool = False) -> tuple[ParsedOutput, bool]:
    parser, output = OutputParser(ExpectedCalls(FUNCTIONS, must_call), "tagged"), ParsedOutput()
    for piece in pieces:
        output += parser.push(piece)
    return output + parser.end(), parser.was_cut


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("template", TEMPLATES)
def test_written_calls_are_read_back(template: str, arguments: dict[str, Any]) -> None:
    text = f"Yes.{written(template, 'f', arguments)}\n{written(template, 'g', {'text': 'a'})}"
    for seed in range(6):
        output, was_cut = parse(pieces_of(text, seed))
        calls = [(call.name, json.loads(call.arguments)) for call in output.calls]
        assert (output.content, calls, was_cut) == ("Yes.", [("f", arguments), ("g", {"text": "a"})], False)


@pytest.mark.parametrize("template", TEMPLATES)
def test_strings_stream(template: str) -> None:
    text = written(template, "f", {"text": "One\n two."})
    parser = OutputParser(ExpectedCalls(FUNCTIONS), "tagged")
    end = text.index("two")
    (call,) = parser.push(text[:end]).calls
    assert (call.name, call.arguments) == ("f", '{"text": "One\\n ')
    (rest,) = parser.push(text[end : end + 4]).calls
    assert (rest.id, rest.arguments) == ("", "two.")
    (last,) = parser.push(text[end + 4 :]).calls
    assert last.arguments == '"}'


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("<tool_call>f\n<arg_key>text</arg_key><arg_value>a\"</arg_", "f", '{"text": "a\\"</arg_'),
        ("<tool_call>f<arg_key>count</arg_key>\n<arg_value>1", "f", '{"count": '),
        ("<tool_call>f<arg_key>te", "f", ""),
        ("<tool_call>\n<function=f>\n<parameter=text>\na\n</param", "f", '{"text": "a\\n</param'),
        ("<tool_call>\n<function=f>\n<parameter=te", "f", ""),
        ("<tool_call>\n<function=f", "f", ""),
        ("<tool_call>f", "f", ""),
        ("<tool_call>\n<funct", "", ""),
    ],
)  # fmt: skip
def test_a_forced_call_that_was_cut_is_what_there_is_of_it(text: str, name: str, arguments: str, seed: int) -> None:
    output, was_cut = parse(pieces_of(text, seed), must_call=True)
    assert [(call.name, call.arguments) for call in output.calls] == [(name, arguments)]
    assert was_cut


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call>f <arg_key>a</arg_key></tool_call>.", "{}"),
        ("<tool_call>f<arg_key>count</arg_key><arg_value>many</arg_value>?</tool_call>.", '{"count": "many"}'),
        ('<tool_call>f<arg_key>count</arg_key><arg_value>"5"</arg_value></tool_call>.', '{"count": "5"}'),
        ("<tool_call>f<arg_key>deep</arg_key><arg_value>{1: NaN}</arg_value></tool_call>.", '{"deep": "{1: NaN}"}'),
        ("<tool_call><function=f><parameter=text>a</parameter><parameter=flag>True</parameter></tool_call>.",
         '{"text": "a", "flag": true}'),
    ],
)  # fmt: skip
def test_calls_that_differ_from_the_form_are_read_too(text: str, arguments: str) -> None:
    for seed in range(4):
        output, _ = parse(pieces_of(text, seed))
        assert (output.content, [call.arguments for call in output.calls]) == (".", [arguments])


def test_a_bare_name_needs_its_mark() -> None:
    assert parse(["<tool_call>some words</tool_call>"])[0] == ParsedOutput("<tool_call>some words</tool_call>")
    assert parse(["f</tool_call>"])[0] == ParsedOutput("f</tool_call>")
