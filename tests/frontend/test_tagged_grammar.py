"""Grammars of calls whose arguments stand between tags: what a function's schema allows, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tidewheel.errors import TidewheelError, Unsupported
from tidewheel.frontend.chat import CallRules
from tidewheel.frontend.tool_grammar import ToolGrammars
from tidewheel.runner.grammar_compiler import GrammarCompiler, to_source

GLM = "<arg_key></arg_key>\n<arg_value>"
TEMPLATES = {"glm": GLM, "glm, together": GLM.replace("\n", ""), "qwen3-coder": "<tool_call><function=<parameter="}
MARKS = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


class Model:
    def __init__(self, folder: Path, template: str, marks: list[str]) -> None:
        self._backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(BYTES)}, merges=[]))
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.decoder = decoders.ByteLevel()
        self._backend.add_tokens(marks)
        self._backend.save(str(folder / "tokenizer.json"))
        self._compiler = GrammarCompiler(folder, len(BYTES) + len(marks))
        tokens = {mark: self._backend.token_to_id(mark) for mark in marks}
        self._grammars, self._name = ToolGrammars(TEMPLATES[template], tokens, ()), template

    def call(self, *arguments: tuple[str, str]) -> str:
        """Return the text of a call."""
        if self._name == "qwen3-coder":
            written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
            return f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
        line = "\n" if self._name == "glm" else ""
        pairs = (f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in arguments)
        return f"<tool_call>f{line}{''.join(pairs)}</tool_call>"

    def allows(self, parameters: dict[str, Any], text: str, rules: CallRules) -> bool:
        functions = [{"function": {"name": name, "parameters": parameters}} for name in rules.names]
        grammar = self._grammars.grammar(rules, functions, "")
        matcher = self._compiler.compile(to_source(grammar), grammar.name).matcher([])
        ids = self._backend.encode(text).ids
        return all(matcher.consume_token(token_id) for token_id in ids) and matcher.is_accepting()


FORCED = CallRules(["f"], [], must_call=True, is_parallel=False)
FREE = CallRules(["f", "g"], ["g"], must_call=False, is_parallel=False)


@pytest.fixture(params=itertools.product(TEMPLATES, (True, False)), ids=str)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    template, has_marks = request.param
    return Model(tmp_path, template, MARKS if has_marks else [])


CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "string": ({"type": "string"}, ["", "a", '"', "\n", " a\n\nb ", "</tool_call é", "{"], []),
    "enum": ({"enum": ["a", "a/b", ""]}, ["a", "a/b", ""], ["b", '"a"']),
    "const": ({"const": "a\nb"}, ["a\nb"], ["a"]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é日\n"], ["a", "abcd"]),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}/[$^|]$"}, ["AB/$"], ["AB/", "xAB/$", "AB/$x"]),
    "searched": ({"type": "string", "pattern": "b|c"}, ["b", "abz\n", "c"], ["", "a"]),
    "format": ({"type": "string", "format": "date"}, ["2026-02-28"], ["2026-02-30", "2026", ""]),
    "integer": ({"type": "integer", "maximum": 5}, ["5", "-12"], ["6", '"5"', "", "a"]),
    "object": ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, ['{"a": "é"}'], ["{}", "a"]),
    "reference": ({"$ref": "#/$defs/e", "description": "x"}, ["p", "q"], ["r", '"p"']),
    "nullable": ({"anyOf": [{"type": "null"}, {"minLength": 1, "type": "string"}]}, ["null", "nul"], ["", "None"]),
    "union": ({"type": ["string", "integer", "array"]}, ["12", "a", "[1]", "null"], ["[a]", "1.5", " 1 "]),
    "unknown": (True, ["12", "a", "[1]", "null", '{"a": 1}', '"a"'], ["[a]", "None", "{a}"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_values_follow_their_schema(model: Model, case: str) -> None:
    schema, allowed, others = CASES[case]
    enum = {"description": "y", "enum": ["p", "q"]}
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": {"e": enum}}
    for value, is_allowed in [*((one, True) for one in allowed), *((one, False) for one in others)]:
        assert model.allows(parameters, model.call(("a", value)), FORCED) == is_allowed, value


def test_arguments_are_in_the_order_of_the_schema_and_optional_ones_may_miss(model: Model) -> None:
    text = {"type": "string"}
    parameters = {"properties": {"a": text, "b": text, "ab": text}, "required": ["b"]}
    for keys, is_allowed in (
        ("a b ab", True),
        ("b", True),
        ("b ab", True),
        ("a", False),
        ("b a", False),
        ("b c", False),
    ):
        call = model.call(*((key, "x") for key in keys.split()))
        assert model.allows(parameters, call, FORCED) == is_allowed, keys
    assert model.allows({}, model.call(), FORCED)


def test_arguments_of_functions_that_are_not_strict_are_free(model: Model) -> None:
    assert model.allows({"properties": {"a": {"type": "integer"}}}, model.call(("b", "x"), ("a", "<y>")), FREE)
    assert model.allows({}, model.call(), FREE)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a": {"type": "string", "format": "hostname"}}}, "f: a: format is 'hostname'"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "f: a: not is not supported"),
        ({"properties": {"a": {"pattern": "^a|b$"}}}, "parameters of f: a: pattern has ^ or $ within"),
        ({"properties": {"a": {"pattern": "a$b"}}}, "a: pattern has ^ or $ within"),
        ({"properties": {"a<b": {}}}, "the property 'a<b' cannot stand in this model's calls"),
        ({"minProperties": 1}, "parameters of f: minProperties is not supported"),
        ({"properties": {"a": {"allOf": [{"type": "string"}]}}}, "a: allOf is not supported"),
    ],
)  # fmt: skip
def test_what_calls_cannot_follow_is_refused(tmp_path: Path, parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported) as caught:
        Model(tmp_path, "glm", []).allows(parameters, "", FORCED)
    assert words in caught.value.message


@pytest.mark.parametrize(("template", "closing"), [("glm", "</arg_value>"), ("qwen3-coder", "</parameter>")])
def test_no_value_holds_the_tag_that_ends_it(tmp_path: Path, template: str, closing: str) -> None:
    model = Model(tmp_path, template, [])
    for schema in ({"type": "string"}, {"type": "string", "pattern": "^.*x.*$"}):
        parameters = {"properties": {"a": schema}, "required": ["a"]}
        assert not model.allows(parameters, model.call(("a", f"x{closing}y")), FORCED)
        assert model.allows(parameters, model.call(("a", f"x{closing[:-1]}y")), FORCED)
    with pytest.raises(TidewheelError, match="which ends values"):
        model.allows({"properties": {"a": {"enum": ["b", closing]}}}, "", FORCED)
