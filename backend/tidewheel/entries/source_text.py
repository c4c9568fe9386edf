"""`config.pbtxt` and `model.json` as texts: where each field stands, which the parsers do not tell."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_PBTXT_TOKEN = re.compile(r"""\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[\w.+-]+|\S""")
_JSON_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[\[\]{}:]')
_CLOSING = {"{": "}", "<": ">", "[": "]"}
_KEYS = ("key", "name")  # fields that tell the elements of a repeated field apart


class Place(NamedTuple):
    line: int  # from 1, like columns
    column: int


class Field(NamedTuple):
    """Field of a protobuf text or a key of a JSON object, as offsets into the text."""

    name: str
    name_start: int
    start: int  # of a message in a list, else of the name
    end: int  # behind the value
    value: str = ""  # of a scalar, without quotes
    value_start: int = 0
    fields: tuple[Field, ...] = ()  # of a message
    list_end: int = 0  # behind the list that it is in

    def child(self, name: str) -> Field | None:
        return next((field for field in self.fields if field.name == name), None)


def place_of(text: str, offset: int) -> Place:
    return Place(text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset))


def pbtxt_fields(text: str) -> tuple[Field, ...]:
    """Return the top-level fields of a valid protobuf text; a list gives a field for each element."""
    return tuple(_Scanner(text).fields(""))


def json_fields(text: str) -> tuple[Field, ...]:
    """Return the keys of a valid JSON object, not those of objects in it."""
    fields, depth = [], 0
    tokens = list(_JSON_TOKEN.finditer(text))
    for token, following in itertools.pairwise(tokens):
        depth += (token[0] in "{[") - (token[0] in "}]")
        if depth == 1 and token[0][0] == '"' and following[0] == ":":
            fields.append(Field(token[0][1:-1], token.start() + 1, token.start(), token.end()))
    return tuple(fields)


def by_path(fields: Iterable[Field]) -> dict[str, Field]:
    """Map paths such as `backend`, `input.text_input.dims` and `parameters.model` to fields, first ones first."""
    found: dict[str, Field] = {}
    for path, field, _ in walk(fields):
        found.setdefault(path, field)
    return found


def walk(fields: Iterable[Field], parent: str = "") -> Iterator[tuple[str, Field, str]]:
    """Yield each field with its path and that of its message, outer ones first. Instance groups are numbered."""
    counts: dict[str, int] = {}
    for field in fields:
        path = f"{parent}.{field.name}" if parent else field.name
        label = next((child.value for key in _KEYS if (child := field.child(key)) is not None), "")
        if field.fields and (label or field.name == "instance_group"):
            path = f"{path}.{label or counts.setdefault(field.name, 0)}"
            counts[field.name] = counts.get(field.name, 0) + 1
        yield path, field, parent
        yield from walk(field.fields, path)


class _Scanner:
    """Recursive descent over tokens, which expects a text that protobuf has parsed."""

    def __init__(self, text: str) -> None:
        self._tokens = [token for token in _PBTXT_TOKEN.finditer(text) if token[0][0] != "#"]
        self._next = 0

    def fields(self, closing: str) -> Iterator[Field]:
        while self._next < len(self._tokens) and not self._take(closing):
            if self._take(",") or self._take(";"):
                continue
            name = self._pop()
            self._take(":")
            if not self._take("["):
                yield self._value(name, name.start())
                continue
            elements = []
            while not self._take("]"):
                first = self._tokens[self._next]
                elements.append(self._value(name, first.start() if first[0] in _CLOSING else name.start()))
                self._take(",")
            list_end = self._tokens[self._next - 1].end()
            yield from (element._replace(list_end=list_end) for element in elements)

    def _value(self, name: re.Match[str], start: int) -> Field:
        first = self._pop()
        if first[0] in _CLOSING:
            inner = tuple(self.fields(_CLOSING[first[0]]))
            return Field(name[0], name.start(), start, self._tokens[self._next - 1].end(), fields=inner)
        last, value = first, _unquoted(first[0])
        while first[0][0] in "\"'" and self._next < len(self._tokens) and self._tokens[self._next][0][0] in "\"'":
            last = self._pop()
            value += _unquoted(last[0])
        return Field(name[0], name.start(), start, last.end(), value, first.start())

    def _pop(self) -> re.Match[str]:
        self._next += 1
        return self._tokens[self._next - 1]

    def _take(self, token: str) -> bool:
        is_next = self._next < len(self._tokens) and self._tokens[self._next][0] == token
        self._next += is_next
        return is_next


def _unquoted(token: str) -> str:
    return token[1:-1] if token[0] in "\"'" else token
