"""Grammars of answers with calls of tools, in the format of a chat template, in llguidance's Lark.

Text before a call is free up to the mark of calls. A mark counts as an added token, which its id matches, and spelled
by other tokens, because both make the same text. Where calls have arguments between tags, a string matches its
schema's patterns and has no closing tag; keywords that no pattern expresses are refused by name.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from tidewheel import tool_formats as formats
from tidewheel.errors import InvalidRequest, Unsupported
from tidewheel.frontend.chat import CallRules
from tidewheel.frontend.coercion import show
from tidewheel.grammar import Grammar, GrammarKind, check_bounds, check_options, read_plainly
from tidewheel.tool_formats import NOTES, alternatives, has_type, own_types, types_of, values_of

_MARKS = (*formats.CALL_MARKS, *formats.SILENT_MARKS, *formats.MORE_THOUGHT_MARKS)
_NO_PARAMETERS: dict[str, Any] = {"properties": {}, "additionalProperties": False}
_OPTIONS = {"whitespace_pattern": " ", "lenient": False, "coerce_one_of": False}
_SPACES = r"[\s\x1c-\x1f]"  # all that the reader of answers strips
_FEW_SPACES = r"[ \n]{1,2}"
_ANY = "(?s:.*)"
# Text that begins so is a call, whatever the format.
_BARE_CALL = rf'{_SPACES}*\{{{_SPACES}*"name'
_MOST_CHARS = 200  # of functions' names in messages
_DEFINITIONS = ("$defs", "definitions")
_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "$schema", "$id", "strict", *_DEFINITIONS}
_STRING_KEYS = {"type", "enum", "const", "pattern", "minLength", "maxLength", "format"}
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = "([01][0-9]|2[0-3])(:[0-5][0-9]){2}(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_UUID = "[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}"
_FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "uuid": _UUID}
# By type: strings that begin as its values do. The gateway could read them as such values.
_NUMBER = f"-?[0-9]{_ANY}"
_NO_STRINGS = {
    "null": "null|None", "boolean": "true|false|True|False", "integer": _NUMBER, "number": _NUMBER,
    "array": rf"\[{_ANY}", "object": rf"\{{{_ANY}",
}  # fmt: skip
_ESCAPES = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)


class ToolGrammars:
    """Maker of grammars for one chat template.

    `tokens`: ids of the added tokens by text. `plain_tokens`: those of them that free text may have.
    """

    def __init__(self, template: str, tokens: Mapping[str, int], plain_tokens: Iterable[str]) -> None:
        self._format = formats.format_of(template)
        self._thoughts = formats.thoughts_of(template, self._format)
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
            tagged = TaggedGrammar(tags, self._literal, self._tokens.get(tags.closing))
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


class TaggedGrammar(NamedTuple):
    """Rules of arguments between tags: strings without quotes, other values in JSON, in the order of the schema."""

    tags: formats.Tags
    literal: Callable[[str], str]  # rule of a fixed text
    closing_id: int | None  # of the token of the closing tag

    def arguments(self, rule: str, schema: Mapping[str, Any] | None, place: str) -> Iterator[str]:
        """Yield the rule of a function's arguments, which are free without a schema. Raise `Unsupported`."""
        opening, end, separator = map(self.literal, (self.tags.opening, self._key_end, self.tags.separator))
        if schema is None:
            yield from self._strings(f"{rule}_value", [f"/{_ANY}/"])
            yield f"{rule}: ({opening} /[^<>\\n]+/ {end} {rule}_value {separator})*"
            return
        _check_keys(place, schema, _OBJECT_KEYS)
        required, properties = schema.get("required", []), schema.get("properties", {})
        parts, values = [], properties | dict.fromkeys({*required} - {*properties}, True)
        for number, (key, value) in enumerate(values.items()):
            found = self.tags.key.match(f"{key}{self._key_end}.")
            if found is None or found[1].strip() != key:
                raise Unsupported(f"{place}: the property {show(key)} cannot stand in this model's calls: rename it")
            yield f"{rule}_{number}: {opening} {self.literal(key + self._key_end)} {rule}_{number}_value {separator}"
            yield from self._value(f"{rule}_{number}_value", value, schema, f"{place}: {key}")
            parts.append(f"{rule}_{number}{'' if key in required else '?'}")
        yield f"{rule}: {' '.join(parts) or json.dumps('')}"

    @property
    def _key_end(self) -> str:
        return self.tags.key_end + self.tags.frame

    def _value(self, rule: str, schema: Any, root: Mapping[str, Any], place: str) -> Iterator[str]:
        """Yield the rule of a value and its closing tag."""
        types, options, rules = types_of(schema, root), list(alternatives(schema, root)), []
        texts = [one for one in options if "string" in own_types(one)]
        excluded = "|".join(pattern for name, pattern in _NO_STRINGS.items() if name in types)
        for number, one in enumerate(texts):
            patterns = [*_string_patterns(place, one, self.tags.closing), f"~/{_SPACES}*({excluded}){_SPACES}*/"]
            rules.append(f"{rule}_string_{number}")
            yield from self._strings(rules[-1], patterns if excluded else patterns[:-1])
        words = [word for word in (None, True, False) if texts and any(_allows(one, word) for one in options)]
        if words:
            rules.append(f"{rule}_word")
            yield from self._strings(rules[-1], [f"({' | '.join(json.dumps(json.dumps(word)) for word in words)})"])
        others = sorted(types - {"string", "null", "boolean"}) if texts else sorted(types)
        if others:
            shared = {key: root[key] for key in _DEFINITIONS if key in root}
            own = {"allOf": [schema, {"type": others}]} if texts else schema
            rules.append(f"{rule}_json {self.literal(self.tags.frame + self.tags.closing)}")
            yield f"{rule}_json: %json {json.dumps({**shared, 'x-guidance': _OPTIONS, **own})}"
        yield f"{rule}: {' | '.join(rules)}"

    def _strings(self, rule: str, patterns: list[str]) -> Iterator[str]:
        """Yield the rule of a text that fits terminals, and its closing tag, as a token and spelled."""
        token, (frame, closing) = rule.upper(), (self.tags.frame, self.tags.closing)
        yield f"{token}: {' & '.join(patterns)} & ~/{_ANY}{_pattern(closing)}{_ANY}/"
        yield f"{token}_FRAMED: {token} {json.dumps(frame)}"
        yield f"{token}_END: {token}_FRAMED {json.dumps(closing)}"
        yield f"{rule}_spelled[lazy]: {token}_END"
        by_id = "" if self.closing_id is None else f" | {token}_FRAMED <[{self.closing_id}]>"
        yield f"{rule}: {rule}_spelled{by_id}"


def _allows(schema: Mapping[str, Any], word: bool | None) -> bool:
    return any(has_type(word, name) for name in own_types(schema)) and any(
        value is word for value in values_of(schema) or [word]
    )


def _string_patterns(place: str, schema: Mapping[str, Any], closing: str) -> Iterator[str]:
    """Yield terminals that a string has to match, each of them."""
    _check_keys(place, schema, _STRING_KEYS)
    texts = [value for value in values_of(schema) or () if isinstance(value, str)]
    if any(closing in text for text in texts):
        raise Unsupported(f"{place}: a value has {closing}, which ends values in this model's calls: leave it out")
    yield f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)})" if texts else f"/{_ANY}/"
    if "minLength" in schema or "maxLength" in schema:
        yield f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/"
    if "pattern" in schema:
        yield _whole_pattern(place, schema["pattern"])
    if "format" in schema and schema["format"] not in _FORMATS:
        raise Unsupported(
            f"{place}: format is {show(schema['format'])}: in this model's calls, {', '.join(_FORMATS)} are known"
        )
    yield f"/{_FORMATS.get(schema.get('format', ''), _ANY)}/"


def _whole_pattern(place: str, pattern: str) -> str:
    """Return the pattern of a whole text for one that is searched in a text. Raise `Unsupported`."""
    inner, plain = pattern.removeprefix("^"), _ESCAPES.sub("", pattern).removeprefix("^")
    begin, end = ("" if inner != pattern else _ANY), ("" if plain.endswith("$") else _ANY)
    depths = itertools.accumulate((character == "(") - (character == ")") for character in plain)
    is_split = any(character == "|" and not depth for character, depth in zip(plain, depths, strict=True))
    if re.search(r"\^|\$.", plain, re.DOTALL) or (is_split and not (begin and end)):
        raise Unsupported(f"{place}: pattern has ^ or $ within: put the whole into ^(?:…)$")
    slashed = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", inner if end else inner[:-1])
    one_line = slashed.replace("\n", r"\n")
    return f"/{begin}({one_line}){end}/"


def _check_keys(place: str, schema: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(schema.keys() - known - NOTES):
        raise Unsupported(
            f"{place}: {unknown[0]} is not supported where calls have strings without quotes: leave it out"
        )
