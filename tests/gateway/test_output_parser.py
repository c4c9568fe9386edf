"""Thoughts, words and calls of tools in a text that arrives in pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tidewheel.gateway.output_parser import ExpectedCalls, Functions, OutputParser, ParsedOutput, Reasoning

TOOLS: Functions = {"weather": {"parameters": {"properties": {"city": {"type": "string"}}}}, "time": {}}
PARIS = ("weather", {"city": "Paris"})
TIME: tuple[str, dict[str, Any]] = ("time", {})
OBJECT = '{"name": "weather", "arguments": {"city": "Paris"}}'
HERMES = f"<tool_call>\n{OBJECT}\n</tool_call>"

MARKED = ("weather", {"city": "P<tool_call></tool_call>aris"})
SEP = "<\uff5ctool\u2581sep\uff5c>"
BEGIN, END = (f"<\uff5ctool\u2581call\u2581{name}\uff5c>" for name in ("begin", "end"))
ALL_BEGIN, ALL_END = (f"<\uff5ctool\u2581calls\u2581{name}\uff5c>" for name in ("begin", "end"))
DEEPSEEK = f'Yes.{ALL_BEGIN}{BEGIN}weather{SEP}{{"city": "Paris"}}{END}{BEGIN}time{SEP}{{}}{END}{ALL_END}'
DEEPSEEK_BLOCK = f'{ALL_BEGIN}{BEGIN}function{SEP}weather\n```json\n{{"city": "Paris"}}\n```{END}{ALL_END}'
CITY = '<|message|>{"city": "Paris"}'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
HARMONY = f"{ANALYSIS}<|channel|>commentary"
PREAMBLE = f"{HARMONY}<|message|>Wait.<|end|><|start|>assistant"

CASES: dict[str, tuple[str, str, str, list[Any]]] = {
    "words": ("A < b, and <tool> is [TOOL].", "A < b, and <tool> is [TOOL].", "", []),
    "spaces": ("  \n ", "  \n ", "", []),
    "hermes": (HERMES, "", "", [PARIS]),
    "two": (f'{HERMES}\n<tool_call>{{"name": "time"}}</tool_call>\n', "", "", [PARIS, TIME]),
    "words first": (f"Let me see.\n{HERMES}", "Let me see.\n", "", [PARIS]),
    "words last": (f"{HERMES}\nDone.", "Done.", "", [PARIS]),
    "cut": ('<tool_call>{"name": "wea', '<tool_call>{"name": "wea', "", []),
    "not closed": (HERMES.removesuffix("</tool_call>"), "", "", [PARIS]),
    "no call": ("<tool_call>[1]</tool_call>.", "<tool_call>[1]</tool_call>.", "", []),
    "deep": ("<tool_call>" + "[" * 99_999, "<tool_call>" + "[" * 99_999, "", []),
    "mistral": (f'[TOOL_CALLS][{{"name": "time"}}, {OBJECT}]', "", "", [TIME, PARIS]),
    "mistral by name": ('[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]time{}', "", "", [PARIS, TIME]),
    "llama": ('{"name": "weather", "parameters": {"city": "Paris"}}', "", "", [PARIS]),
    "llama, two": (f'<|python_tag|>{{"name": "time"}}; {OBJECT}', "", "", [TIME, PARIS]),
    "a mark in a string": (HERMES.replace("aris", "<tool_call></tool_call>aris"), "", "", [MARKED]),
    "escapes": (HERMES.replace("Paris", 'a\\\\\\"}} b'), "", "", [("weather", {"city": 'a\\"}} b'})]),
    "by name, with an id": ('[TOOL_CALLS]weather[CALL_ID]a1b2[ARGS]{"city": "Paris"}', "", "", [PARIS]),
    "deepseek": (f"<think>a</think>\n\n{DEEPSEEK}", "Yes.", "a", [PARIS, TIME]),
    "deepseek, blocks": (DEEPSEEK_BLOCK, "", "", [PARIS]),
    "harmony": (f"{HARMONY} to=functions.weather <|constrain|>json{CITY}", "", "Hm.", [PARIS]),
    "harmony, by role": (f"<|start|>assistant to=functions.weather<|channel|>commentary json{CITY}", "", "", [PARIS]),
    "harmony, preamble": (f"{PREAMBLE}{HARMONY} to=functions.weather json{CITY}", "Wait.", "Hm.Hm.", [PARIS]),
    "harmony, answer": (f"{ANALYSIS}<|channel|>final<|message|>Yes <|x", "Yes <|x", "Hm.", []),
    "magistral": ('[THINK]a[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "", "a", [PARIS]),
    "an object": ('{"name": "Ann", "age": 4}', '{"name": "Ann", "age": 4}', "", []),
    "thought": ("\n<think>\nHm < 3.</think>\n\nYes.", "Yes.", "\nHm < 3.", []),
    "thought and call": (f"<think>a</think>{HERMES}", "", "a", [PARIS]),
    "thought and object": ('<think>a</think>\n{"name": "time"}', "", "a", [TIME]),
    "only thought": ("<think>a</thi", "", "a</thi", []),
    "later thought": ("a <think>b</think>", "a <think>b</think>", "", []),
    "half a tag": ("<thin", "<thin", "", []),
}  # fmt: skip


def parse(
    pieces: list[str],
    tools: Functions | None = TOOLS,
    reasoning: Reasoning = "tagged",
    *,
    is_forced: bool = False,
) -> ParsedOutput:
    parser = OutputParser(ExpectedCalls(tools, must_call=is_forced), reasoning)
    output = ParsedOutput()
    for piece in pieces:
        output += parser.push(piece)
    return output + parser.end()


def pieces_of(text: str, seed: int) -> list[str]:
    """Cut a text at random; with the seed 0, not at all, and with 1, into characters."""
    if seed < 2:
        return [text] if seed == 0 else list(text)
    chosen = random.Random(seed)
    cuts = sorted(chosen.randrange(len(text) + 1) for _ in range(6))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(6))
def test_pieces_make_the_same_parts(case: str, seed: int) -> None:
    text, content, reasoning, calls = CASES[case]
    if seed == 1 and len(text) > 1000:
        seed = 0
    output = parse(pieces_of(text, seed))
    assert (output.content, output.reasoning) == (content, reasoning)
    assert [(call.name, json.loads(call.arguments)) for call in output.calls] == calls
    assert len({call.id for call in output.calls}) == len(calls)
    assert all(len(call.id) == 9 and call.id.isalnum() for call in output.calls)


@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_was_cut_keeps_what_there_is_of_its_arguments(seed: int) -> None:
    (call,) = parse(pieces_of(HERMES[:-17], seed)).calls
    assert (call.name, call.arguments) == ("weather", '{"city": "Pari')


@pytest.mark.parametrize("text", ['{"arguments": {}, "name": "time"}', '{"n\\u0061me": "time", "arguments": {}}'])
def test_strict_calls_outside_marks_begin_with_their_name(text: str) -> None:
    assert len(parse([text]).calls) == 1
    parser = OutputParser(ExpectedCalls(TOOLS, is_strict=True), "tagged")
    assert parser.push(text) + parser.end() == ParsedOutput(text)


def test_without_tools_nothing_is_a_call() -> None:
    for text in (HERMES, '{"name": "time"}', "[TOOL_CALLS][]"):
        assert parse(list(text), tools=None) == ParsedOutput(text)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        (OBJECT, "weather", '{"city": "Paris"}'),
        (OBJECT[:-1], "weather", '{"city": "Paris"}'),
        (OBJECT[:-4], "weather", '{"city": "Pari'),
        (OBJECT[:34], "weather", "{"),
        (OBJECT[:33], "weather", ""),
        ('{ "name" : "weather" , "arg', "weather", ""),
        ('{"name": "we', "weather", ""),
        ('{"name": "t', "time", ""),
        ('{"name": "', "", ""),
        ('{"na', "", ""),
        ("", "", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_that_was_cut_is_what_there_is_of_it(text: str, name: str, arguments: str, seed: int) -> None:
    output = parse(pieces_of(text, seed), is_forced=True)
    (call,) = output.calls
    assert (call.name, call.arguments, output.content) == (name, arguments, "")
    assert len(call.id) == 9


def test_the_only_function_is_the_one_that_is_called() -> None:
    (call,) = parse(["{"], {"weather": {}}, is_forced=True).calls
    assert (call.name, call.arguments) == ("weather", "")


def test_where_the_thought_begins() -> None:
    assert parse(["a</think>b"], reasoning="always") == ParsedOutput("b", "a")
    assert parse(["<think>a</think>b"], reasoning="off") == ParsedOutput("<think>a</think>b")
    assert parse(["a</think>b"], reasoning="tagged") == ParsedOutput("a</think>b")


def test_text_comes_as_soon_as_it_is_certain() -> None:
    parser = OutputParser(ExpectedCalls(TOOLS), "tagged")
    assert parser.push("Well, <too") == ParsedOutput("Well, ")
    assert parser.push("th> ") == ParsedOutput("<tooth> ")
    assert len(parser.push(HERMES).calls) == 1
    assert OutputParser(ExpectedCalls(), "off").push("<tool_call>") == ParsedOutput("<tool_call>")
