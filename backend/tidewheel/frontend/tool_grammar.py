"""Grammars of answers with calls of tools, in the format of a chat template, in llguidance's Lark.

Text before a call is free up to the mark of calls. A mark counts as an added token, which its id matches, and spelled
by other tokens, because both make the same text.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from tidewheel.errors import InvalidRequest
from tidewheel.frontend.chat import CallRules
from tidewheel.frontend.coercion import show
from tidewheel.frontend.tagged_grammar import TaggedGrammar
from tidewheel.grammar import Grammar, GrammarKind, check_bounds, check_options, read_plainly
from tidewheel.tool_formats.known_formats import CALL_MARKS, MORE_THOUGHT_MARKS, SILENT_MARKS, format_of, thoughts_of

_MARKS = (*CALL_MARKS, *SILENT_MARKS, *MORE_THOUGHT_MARKS)
_NO_PARAMETERS: dict[str, Any] = {"properties": {}, "additionalProperties": False}
_OPTIONS = {"whitespace_pattern": " ", "lenient": False, "coerce_one_of": False}
_SPACES = r"[\s\x1c-\x1f]"  # all that the reader of answers strips
_FEW_SPACES = r"[ \n]{1,2}"
_ANY = "(?s:.*)"
# Text that begins so is a call, whatever the format.
_BARE_CALL = rf'{_SPACES}*\{{{_SPACES}*"name'
_MOST_CHARS = 200  # of functions' names in messages


class ToolGrammars:
    """Maker of grammars for one chat template.

    `tokens`: ids of the added tokens by text. `plain_tokens`: those of them that free text may have.
    """

    def __init__(self, template: str, tokens: Mapping[str, int], plain_tokens: Iterable[str]) -> None:
        self._format = format_of(template)
        self._thoughts = thoughts_of(template, self._format)
        self._tokens = tokens
        marks = {*_MARKS, *(self._thoughts or ()), self._format.trigger, self._format.closing}
        self._plain_ids = sorted(tokens[text] for text in {*plain_tokens} - marks)

    def grammar(self, rules: CallRules, tools: Iterable[dict[str, Any]], prompt: str) -> Grammar:
        """Return the grammar of the answer to a prompt. Raise `InvalidRequest` or `Unsupported`."""
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        names = " or ".join(rules.names)
        place = f"tools: parameters of {names if len(names) <= _MOST_CHARS else 'a function'}"
        lines = [*self._calls(rules), *self._start(prompt, must_call=rules.must_call)]
        for index, name in enumerate(rules.names):
            has_schema = rules.must_call or name in rules.strict
            schema = _schema(name, functions[name].get("parameters")) if has_schema else None
            lines += self._arguments(f"arguments_{index}", schema, f"tools: parameters of {name}")
        return Grammar(GrammarKind.LARK, "\n".join(lines), place)

    def _arguments(self, rule: str, schema: dict[str, Any] | None, place: str) -> Iterator[str]:
        """Yield the rule of a call's arguments, which follow no schema if that is None."""
        tags = next((mark.tags for mark in self._format.marks.values()), None)
        if tags is None:
            yield f"{rule}: %json {json.dumps({'x-guidance': _OPTIONS} | (schema or {'type': 'object'}))}"
        else:
            tagged = TaggedGrammar(tags, self._literal, self._tokens.get(tags.closing), _OPTIONS)
            yield from tagged.arguments(rule, schema, place)

    def _calls(self, rules: CallRules) -> Iterator[str]:
        """Yield the rule `calls`, of all after the mark."""
        chosen = self._format
        begins = [chosen.begin.replace("NAME", name) for name in rules.names]
        firsts = [(chosen.opening + begin).removeprefix(chosen.trigger) for begin in begins]
        end = self._literal(chosen.end)
        for rule, texts in (("first_call", firsts), ("call", begins)):
            calls = (f"{self._literal(text)} arguments_{index} {end}" for index, text in enumerate(texts))
            yield f"{rule}: {' | '.join(calls)}"
        is_repeated = rules.is_parallel and not chosen.has_one_call
        more = f"({self._literal(chosen.separator)} call)*" if is_repeated else ""
        yield f"calls: first_call {more} {self._literal(chosen.closing)}"

    def _start(self, prompt: str, *, must_call: bool) -> Iterator[str]:
        yield f"space: /{_FEW_SPACES if must_call else _SPACES + '+'}/"
        yield f"marked_calls: {self._literal(self._format.trigger)} calls"
        begin, end = self._thoughts or ("", "")
        ending = prompt.rstrip()
        if not begin or ending.endswith(end):
            yield "start: answer"
            yield from self._answer("answer", must_call=must_call)
            return
        yield from self._text("thought", [end], end)
        yield from self._answer("answer", must_call=must_call)
        begun = "" if ending.endswith(begin) else f"space? {self._literal(begin)}"
        whole = f"{begun} thought_to_end {self._literal(self._format.after_thoughts)} answer"
        starts = [whole] if must_call else [whole, f"{begun} thought"]
        if begun:
            yield from self._answer("first_answer", must_call=must_call, excluded=f"{_SPACES}*{_pattern(begin)}")
            starts.append("first_answer")
        yield f"start: {' | '.join(starts)}"

    def _answer(self, name: str, *, must_call: bool, excluded: str = "") -> Iterator[str]:
        """Yield the rule of an answer that does not begin with `excluded`, a pattern."""
        chosen, text, begins = self._format, f"{name}_text", "|".join(filter(None, (excluded, _BARE_CALL)))
        if must_call:
            yield f"{name}: {'' if chosen.after_thoughts else 'space?'} marked_calls"
        elif chosen.answer:
            before, after = map(self._literal, chosen.preamble)
            yield f"{name}: {self._literal(chosen.answer)} {text} | ({before} {text} {after})? marked_calls"
            yield from self._text(text, _MARKS)
        elif chosen.trigger:
            yield f"{name}: {text} | {text}_to_end calls"
            yield from self._text(text, {*_MARKS, chosen.trigger}, chosen.trigger, begins)
        else:
            yield f"{name}: {text} | space? calls"
            yield from self._text(text, _MARKS, "", begins)

    def _text(self, name: str, marks: Iterable[str], end: str = "", excluded: str = "") -> Iterator[str]:
        """Yield the rule of a text without `marks`, and `…_to_end`: one up to `end`, which is one of them."""
        begins = f" & ~/({excluded}){_ANY}/" if excluded else ""
        token = name.upper()
        yield f"{token}: /(?s:.+)/{_without(marks)}{begins}"
        plain = f"<[{','.join(map(str, self._plain_ids))}]>" if self._plain_ids else ""
        yield f"{name}: {token}?" + (f" ({plain} {token}?)*" if plain else "")
        if end:
            yield f"{token}_END: /{_ANY}{_pattern(end)}/{_without(mark for mark in marks if mark != end)}{begins}"
            yield f"{name}_spelled[lazy]: {token}_END"
            rests = [f"<[{self._tokens[end]}]>"] if end in self._tokens else []
            rests += [f"{plain} {name}_to_end"] if plain else []
            more = f" | {token}? ({' | '.join(rests)})" if rests else ""
            yield f"{name}_to_end: {name}_spelled{more}"

    def _literal(self, text: str) -> str:
        """Return the rule of a fixed text."""
        found = sorted(filter(text.__contains__, self._tokens), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
        quoted = {part: json.dumps(part, ensure_ascii=False) for part in parts if part}
        known = {part: f"({quoted[part]} | <[{self._tokens[part]}]>)" for part in found if part in quoted}
        return " ".join((quoted | known)[part] for part in parts if part)


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _without(marks: Iterable[str]) -> str:
    pattern = "|".join(sorted(map(_pattern, marks)))
    return f" & ~/{_ANY}({pattern}){_ANY}/" if pattern else ""


def _schema(name: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a function's arguments. Raise `InvalidRequest` or `Unsupported`."""
    place, schema = f"tools: parameters of {name}", {"type": "object"} | deepcopy(dict(parameters or _NO_PARAMETERS))
    if schema["type"] != "object":
        raise InvalidRequest(f"{place}: type is {show(schema['type'])}: arguments are an object")
    check_options(place, schema)
    check_bounds(place, schema)
    read_plainly(schema)
    return schema
