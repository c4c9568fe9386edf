"""Rules of arguments between tags: strings without quotes, other values in JSON, in the order of the schema.

A string matches its schema's patterns and has no closing tag. Keywords that no pattern expresses are refused by name.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tidewheel.errors import Unsupported
from tidewheel.frontend.coercion import show
from tidewheel.tool_formats.argument_types import (
    NOTES,
    Schema,
    alternatives,
    has_type,
    own_types,
    types_of,
    values_of,
)
from tidewheel.tool_formats.known_formats import Tags

_ANY, _SPACES = "(?s:.*)", r"[\s\x1c-\x1f]*"
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


class TaggedGrammar(NamedTuple):
    tags: Tags
    literal: Callable[[str], str]  # rule of a fixed text
    closing_id: int | None  # of the token of the closing tag
    options: Mapping[str, Any]  # of llguidance, for JSON

    def arguments(self, rule: str, schema: Schema | None, place: str) -> Iterator[str]:
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

    def _value(self, rule: str, schema: Any, root: Schema, place: str) -> Iterator[str]:
        """Yield the rule of a value and its closing tag."""
        types, options, rules = types_of(schema, root), list(alternatives(schema, root)), []
        texts = [one for one in options if "string" in own_types(one)]
        excluded = "|".join(pattern for name, pattern in _NO_STRINGS.items() if name in types)
        for number, one in enumerate(texts):
            patterns = [*_string_patterns(place, one, self.tags.closing), f"~/{_SPACES}({excluded}){_SPACES}/"]
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
            yield f"{rule}_json: %json {json.dumps({**shared, 'x-guidance': self.options, **own})}"
        yield f"{rule}: {' | '.join(rules)}"

    def _strings(self, rule: str, patterns: list[str]) -> Iterator[str]:
        """Yield the rule of a text that fits terminals, and its closing tag, as a token and spelled."""
        token, (frame, closing) = rule.upper(), (self.tags.frame, self.tags.closing)
        yield f"{token}: {' & '.join(patterns)} & ~/{_ANY}{_escaped(closing)}{_ANY}/"
        yield f"{token}_FRAMED: {token} {json.dumps(frame)}"
        yield f"{token}_END: {token}_FRAMED {json.dumps(closing)}"
        yield f"{rule}_spelled[lazy]: {token}_END"
        by_id = "" if self.closing_id is None else f" | {token}_FRAMED <[{self.closing_id}]>"
        yield f"{rule}: {rule}_spelled{by_id}"


def _allows(schema: Schema, word: bool | None) -> bool:
    return any(has_type(word, name) for name in own_types(schema)) and any(
        value is word for value in values_of(schema) or [word]
    )


def _string_patterns(place: str, schema: Schema, closing: str) -> Iterator[str]:
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
    return f"/{begin}({_slashed(inner if end else inner[:-1])}){end}/"


def _slashed(pattern: str) -> str:
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern).replace("\n", r"\n")


def _escaped(text: str) -> str:
    return _slashed(re.escape(text))


def _check_keys(place: str, schema: Schema, known: set[str]) -> None:
    if unknown := sorted(schema.keys() - known - NOTES):
        raise Unsupported(
            f"{place}: {unknown[0]} is not supported where calls have strings without quotes: leave it out"
        )
