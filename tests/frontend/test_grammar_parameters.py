from __future__ import annotations

import json
from typing import Any

import pytest

from tidewheel.errors import InvalidRequest, TidewheelError, Unsupported
from tidewheel.frontend.coercion import ParameterSource
from tidewheel.frontend.request_parameters import parse_parameters
from tidewheel.grammar import MAX_GRAMMAR_BYTES, Grammar

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["é", None]}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
RULES = 'root ::= "a" [0-9]+'


def grammar(**given: object) -> Grammar | None:
    return parse_parameters([ParameterSource(origin="sampling_parameters", values=given)]).sampling.grammar


def wrapped(**members: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, **members}}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"guided_json": SCHEMA}, Grammar.json_schema(TEXT)),
        ({"guided_json": TEXT}, Grammar.json_schema(TEXT)),
        ({"guided_json": {}}, Grammar.json_schema("{}")),
        (
            {"guided_json": '{"properties": {"x-guidance": {"const": {"x-guidance": 1}}}}'},
            Grammar.json_schema('{"properties": {"x-guidance": {"const": {"x-guidance": 1}}}}'),
        ),
        ({"guided_json_object": True}, Grammar.json_object()),
        ({"guided_regex": "a+"}, Grammar.regex("a+")),
        ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"guided_choice": '["a", "b"]'}, Grammar.choice(["a", "b"])),
        ({"guided_grammar": RULES, "guided_decoding_backend": "outlines"}, Grammar.ebnf(RULES)),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(TEXT)),
        ({"structured_outputs": {"json_object": True, "regex": None}}, Grammar.json_object()),
        ({"structured_outputs": '{"choice": ["a"], "disable_fallback": true}'}, Grammar.choice(["a"])),
        ({"guided_decoding": {"grammar": RULES, "backend": "auto"}}, Grammar.ebnf(RULES)),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": False}}, Grammar.json_object()),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            Grammar.json_schema(TEXT),
        ),
        ({"guided_decoding_guide_type": "json"}, Grammar.json_schema('{"type": ["object", "array"]}')),
        ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": TEXT}, Grammar.json_schema(TEXT)),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a"}, Grammar.regex("a")),
        ({"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": RULES}, Grammar.ebnf(RULES)),
        (wrapped(name="x", description="y", strict=True), Grammar.json_schema({"type": "object"})),
        ({"guided_json": TEXT, "response_format": {"type": "text"}}, Grammar.json_schema(TEXT)),
        ({"guided_json": None, "guided_choice": None, "guided_regex": None, "guided_json_object": False}, None),
        ({"structured_outputs": {"json": None, "choice": None, "json_object": False, "regex": None}}, None),
        ({"guided_decoding": {"grammar": None, "whitespace_pattern": "", "backend": ""}}, None),
        ({"structured_outputs": {}, "guided_decoding": None, "response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"structural_tag": None, "_backend_was_auto": False}}, None),
        ({"guided_decoding_guide_type": "", "guided_decoding_guide": ""}, None),
    ],
    ids=str,
)
def test_spellings(given: dict[str, object], expected: Grammar | None) -> None:
    assert grammar(**given) == expected


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"guided_json": "{"}, InvalidRequest, "guided_json is not JSON"),
        ({"guided_json": '{"a": 1, "a": 2}'}, InvalidRequest, "guided_json has the key 'a' twice"),
        ({"guided_json": "[" * 10_000}, InvalidRequest, "guided_json is not JSON that can be read: it is nested too"),
        ({"guided_json": {"title": "\ud800"}}, InvalidRequest, "guided_json is not valid Unicode: it holds a lone"),
        ({"guided_json": [1]}, InvalidRequest, "guided_json is [1]: it must be a JSON schema, an object"),
        ({"guided_json": True}, InvalidRequest, "guided_json is True"),
        ({"guided_json": {"x-guidance": {"item_separator": ";"}}}, Unsupported, "guided_json: x-guidance is set"),
        ({"guided_json": '{"items": {"x-guidance": {}}}'}, Unsupported, "guided_json: x-guidance is set"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x-guidance": {}}}}},
            Unsupported,
            "response_format.json_schema.schema: x-guidance is set",
        ),
        ({"guided_json": False}, InvalidRequest, "guided_json is False: it must be a JSON schema, an object"),
        ({"guided_json": ""}, InvalidRequest, "guided_json is empty: give a json_schema, or leave it out"),
        ({"guided_json": []}, InvalidRequest, "guided_json is []: it must be a JSON schema, an object"),
        ({"guided_regex": ""}, InvalidRequest, "guided_regex is empty: give a regex, or leave it out"),
        ({"guided_choice": []}, InvalidRequest, "guided_choice has 0 choices: it must have 1 to 1024"),
        ({"guided_choice": ""}, InvalidRequest, "guided_choice is not JSON"),
        ({"structured_outputs": {"choice": []}}, InvalidRequest, "structured_outputs.choice has 0 choices"),
        ({"structured_outputs": {"grammar": ""}}, InvalidRequest, "structured_outputs.grammar is empty: give a"),
        ({"guided_regex": 5}, InvalidRequest, "guided_regex is 5: it must be text"),
        ({"guided_choice": "a"}, InvalidRequest, "guided_choice is not JSON"),
        ({"guided_choice": [1]}, InvalidRequest, "guided_choice is 1: it must be text"),
        ({"guided_choice": ["a"] * 1025}, InvalidRequest, "guided_choice has 1025 choices: it must have 1 to 1024"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, InvalidRequest, "guided_regex has 131073 bytes: at most"),
        ({"guided_json": {}, "guided_regex": "a"}, InvalidRequest, "guided_json and guided_regex are set: give one"),
        ({"guided_json": {}, "guided_whitespace_pattern": " "}, Unsupported, "guided_whitespace_pattern is ' '"),
        ({"structured_outputs": {"structural_tag": "x"}}, Unsupported, "structured_outputs.structural_tag is 'x'"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            Unsupported,
            "structured_outputs.disable_additional_properties is True",
        ),
        ({"structured_outputs": {"jsn": {}}}, Unsupported, "structured_outputs.jsn is {}"),
        ({"structured_outputs": "[1]"}, InvalidRequest, "structured_outputs is [1]: it must be an object"),
        (
            {"guided_json": {}, "guided_decoding": {"regex": "a"}},
            InvalidRequest,
            "guided_json and guided_decoding.regex are set: give one",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            InvalidRequest,
            "structured_outputs.regex and response_format are set: give one",
        ),
        ({"guided_decoding_guide": "a"}, InvalidRequest, "guided_decoding_guide_type is not: set both"),
        ({"guided_decoding_guide_type": "regex"}, InvalidRequest, "guided_decoding_guide is not set: set both"),
        (
            {"guided_decoding_guide_type": "structural_tag", "guided_decoding_guide": "{}"},
            Unsupported,
            "guided_decoding_guide_type is 'structural_tag': it must be json, json_schema, regex or ebnf_grammar",
        ),
        ({"response_format": {"type": "xml"}}, Unsupported, "response_format has the type 'xml'"),
        ({"response_format": {"type": "json_schema"}}, InvalidRequest, "response_format needs json_schema"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            InvalidRequest,
            "response_format.schema is set beside the type json_object: send the type json_schema",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
            InvalidRequest,
            "response_format.json_schema is set beside the type text: send the type json_schema",
        ),
        (
            {"response_format": {"type": "text", "made_up": 1}},
            InvalidRequest,
            "response_format.made_up is set beside the type text: leave it out",
        ),
        (wrapped(foo=1), InvalidRequest, "response_format.json_schema.foo is unknown: known are name, description"),
        (wrapped(name=5), InvalidRequest, "response_format.json_schema.name is 5: it must be text"),
        (wrapped(strict="maybe"), InvalidRequest, "response_format.json_schema.strict is 'maybe': it must be true"),
        ({"grammar": "root"}, InvalidRequest, "grammar is 'root': send guided_grammar or structured_outputs"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_mistakes_are_named(given: dict[str, object], error: type[TidewheelError], words: str) -> None:
    with pytest.raises(error) as caught:
        grammar(**given)
    assert words in str(caught.value)


def test_grammars_of_two_sources() -> None:
    def both(first: str, second: str) -> Grammar | None:
        sources = [
            ParameterSource(origin=origin, values={"guided_regex": pattern})
            for origin, pattern in (("sampling_parameters", first), ("the request", second))
        ]
        return parse_parameters(sources).sampling.grammar

    assert both("a", "a") == Grammar.regex("a")
    with pytest.raises(InvalidRequest) as caught:
        both("a", "b")
    expected = "guided_regex in sampling_parameters and guided_regex in the request are set: give one"
    assert expected in str(caught.value)
