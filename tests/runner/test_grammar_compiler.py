"""Which texts compiled grammars allow, and what a client reads of one that cannot be followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from tidewheel.errors import InvalidRequest, TidewheelError, Unsupported
from tidewheel.frontend.coercion import ParameterSource
from tidewheel.frontend.grammar_parameters import find_grammar
from tidewheel.grammar import Grammar
from tidewheel.runner.grammar_compiler import GrammarCompiler, to_source

NUM_BYTES = 256
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """A compiler whose tokens are bytes."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(BYTES)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folder: Path = tmp_path_factory.mktemp("bytes")
    backend.save(str(folder / "tokenizer.json"))
    return GrammarCompiler(folder, NUM_BYTES)


def allows(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    matcher = compiler.compile(to_source(grammar), grammar.name).matcher([])
    reader = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = "".join(piece for piece, _ in reader.pre_tokenize_str(text))
    return all(matcher.consume_token(BYTES.index(char)) for char in pieces) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("rules", "allowed", "others"),
    [
        (r'root ::= "\u00e9" [\u00e8-\u00ea]', ["éê"], ["éz", "e9"]),
        (r'root ::= "\xe9\x41"', ["éA"], ["xe9A"]),
        (r'root ::= "\U0001F600"', ["😀"], ["U"]),
        (r'root ::= "\u0022\u005c"', ['"\\'], ["u"]),
        (r'root ::= "\\u00e9" # "not this" [', [r"\u00e9"], ["é", "\\é"]),
        (r"root ::= [^\u005d\x5e\u002d]", ["a", "\\"], ["]", "^", "-"]),
        ('root ::= "a\nb" "/"', ["a\nb/"], ["ab/"]),
        ('root ::= "a ::= b" item{2,3}\nitem ::= "c"', ["a ::= bcc"], ["a ::= bc"]),
        ('start: "a" B\nB: "::=" /\\u0062/', ["a::=b"], ["a"]),
    ],
)
def test_rules(compiler: GrammarCompiler, rules: str, allowed: list[str], others: list[str]) -> None:
    grammar = Grammar.ebnf(rules)
    assert [text for text in allowed + others if allows(compiler, grammar, text)] == allowed


@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=8))
def test_any_character_may_be_written_as_an_escape(compiler: GrammarCompiler, text: str) -> None:
    def written(char: str) -> str:
        return f"\\u{ord(char):04x}" if ord(char) < 1 << 16 else f"\\U{ord(char):08x}"

    literal = Grammar.ebnf(f'root ::= "{"".join(map(written, text))}"')
    sets = Grammar.ebnf("root ::= " + " ".join(f"[{written(char)}]" for char in text))
    assert allows(compiler, literal, text)
    assert allows(compiler, sets, text)


@pytest.mark.parametrize(
    ("schema", "allowed", "others"),
    [
        ({"type": "array", "items": {"const": 1}, "minItems": 2.0, "uniqueItems": False}, ["[1,1]"], ["[1]"]),
        ({"type": "string", "maxLength": 1.0}, ['"a"'], ['"ab"']),
        ({"properties": {"uniqueItems": {"const": 1}}, "required": ["uniqueItems"]}, ['{"uniqueItems":1}'], ["{}"]),
        ({"const": {"uniqueItems": False}}, ['{"uniqueItems":false}'], ["{}"]),
    ],
)
def test_schemas_that_ask_for_nothing_more(
    compiler: GrammarCompiler, schema: dict[str, Any], allowed: list[str], others: list[str]
) -> None:
    grammar = Grammar.json_schema(schema)
    assert [text for text in allowed + others if allows(compiler, grammar, text)] == allowed


DEEP = '{"a":' * 30 + "{}" + "}" * 30


@pytest.mark.parametrize(
    "parameters",
    [
        {"guided_json_object": True},
        {"guided_json": {"type": "object"}},
        {"guided_json": '{"type": "object"}'},
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}}}}},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"guided_decoding": {"json_object": True}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
        {"guided_decoding_guide_type": "json"},
        {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"type": "object"}'},
    ],
    ids=str,
)
def test_between_tokens_of_json_there_is_one_space_at_most(
    compiler: GrammarCompiler, parameters: dict[str, object]
) -> None:
    grammar = find_grammar([ParameterSource(origin="request", values=parameters)])
    assert isinstance(grammar, Grammar)
    for spaced in (DEEP, DEEP.replace(":", ": "), DEEP.replace("{", "{ ").replace("}", " }").replace("{  }", "{ }")):
        assert allows(compiler, grammar, spaced)
    for more in ("  ", "\n", "\t", "\n" * 9):
        assert not any(allows(compiler, grammar, DEEP.replace(token, token + more)) for token in '{:"}')


@pytest.mark.parametrize(
    ("grammar", "error", "words"),
    [
        (Grammar.ebnf('root ::= "a"\nroot ::= "b"', "g"), InvalidRequest, "g is no valid ebnf: the rule"),
        (Grammar.ebnf('root ::= foo Foo\nfoo ::= "x"\nFoo ::= "y"', "g"), InvalidRequest, "the rule Foo .* case"),
        (Grammar.ebnf('root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"', "g"), InvalidRequest, "the rule a_b .* case"),
        (Grammar.ebnf('root ::= start\nstart ::= "a"', "g"), InvalidRequest, "the rule start is called start"),
        (Grammar.ebnf(r'root ::= "\ud800"', "g"), InvalidRequest, r"g is no valid ebnf: \\ud800 is no character"),
        (Grammar.ebnf("root ::= [", "g"), InvalidRequest, "Unexpected end of input at line 1"),
        (Grammar.ebnf("[" * 100_000, "g"), InvalidRequest, "Expected name at line 1"),
        (Grammar.ebnf("root ::= " + "[" * 100_000, "g"), InvalidRequest, "Unexpected end of input at line 1"),
        (Grammar.ebnf("start: start", "g"), InvalidRequest, "g cannot be followed: no text follows it"),
        (Grammar.regex(r"[^\s\S]", "r"), InvalidRequest, "r cannot be followed: no text follows it"),
        (Grammar.json_schema({"not": {}}, "s"), Unsupported, 's cannot be followed: "not" is not supported'),
        (
            Grammar.json_schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "s"),
            Unsupported,
            "s cannot be followed: oneOf with cases that overlap is not supported: use anyOf",
        ),
        (Grammar.json_schema({"$ref": "https://x/y"}, "s"), InvalidRequest, "'https://x/y' is another document"),
        (Grammar.json_schema("false", "s"), InvalidRequest, "s is no valid json schema"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, Grammar) else "",
)
def test_what_cannot_be_followed_is_said_plainly(
    compiler: GrammarCompiler, grammar: Grammar, error: type[TidewheelError], words: str
) -> None:
    with pytest.raises(error, match=words):
        compiler.compile(to_source(grammar), grammar.name)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"enum": ["x <tool_call> y"]}),
        Grammar.choice(['"x <tool_call> y"', "z"]),
        Grammar.regex('"x <tool[_]call> y"'),
        Grammar.ebnf('root ::= "\\"x <tool_call> y\\""'),
    ],
    ids=lambda grammar: str(grammar.kind),
)
def test_texts_of_added_tokens_are_spelled(tmp_path: Path, grammar: Grammar) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(BYTES)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["<tool_call>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert allows(GrammarCompiler(tmp_path, NUM_BYTES + 1), grammar, '"x <tool_call> y"')
