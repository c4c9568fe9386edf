"""Arguments of a call between tags, which become JSON as they arrive, and the search of marks in a text."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tidewheel.tool_formats import STRING, Schema, Tags, has_type, types_of

_NOTHING = "(?!)"  # matches no text
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}  # chat templates may write values as Python does


class MarkFinder:
    """Finder of the first of some marks in a text that arrives in pieces."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, marks)) or _NOTHING)
        self._openers = re.compile("|".join({re.escape(mark[0]): None for mark in marks}) or _NOTHING)
        self._beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
        self._longest = max(map(len, self._beginnings), default=0)

    def split(self, text: str) -> tuple[str, str, str]:
        """Return the text before the first mark, the mark, and the rest. Without a mark, the rest may begin one."""
        if (found := self._pattern.search(text)) is not None:
            return text[: found.start()], found[0], text[found.end() :]
        for opener in self._openers.finditer(text, max(len(text) - self._longest, 0)):
            if text[opener.start() :] in self._beginnings:
                return text[: opener.start()], "", text[opener.start() :]
        return text, "", ""


_finder = cache(MarkFinder)


class TaggedArguments:
    """Reader of one call's arguments. `end` is the mark after them, `parameters` their schema."""

    def __init__(self, tags: Tags, end: str, parameters: object) -> None:
        self.has_ended = False
        self._tags = tags
        self._end = end
        self._schema: Schema = parameters if isinstance(parameters, dict) else {}
        self._held = ""
        self._num_keys = 0
        self._types = STRING  # of the current value
        self._state: Callable[[], str | None] = self._between

    def read(self, text: str) -> tuple[str, str]:
        """Return the JSON read so far, and the unread text, which needs more text or follows the call."""
        self._held, pieces = text, []
        while not self.has_ended and (piece := self._state()) is not None:
            pieces.append(piece)
        return "".join(pieces), self._held

    def cut(self, rest: str) -> str:
        """Return the JSON of the unread `rest` of a call that was cut off."""
        return _escaped(rest) if self._state == self._in_string else ""

    # Each state is a method that returns the JSON of its part, or None if it needs more text.

    def _between(self) -> str | None:
        _, mark, self._held = _finder((self._tags.opening, self._end)).split(self._held)
        if mark == self._end:
            self.has_ended = True
            return "}" if self._num_keys else "{}"
        self._state = self._in_key if mark else self._between
        return "" if mark else None

    def _in_key(self) -> str | None:
        found = self._tags.key.match(self._held)
        if found is None:  # after the call's end, it never fits
            self._state = self._between if self._end in self._held else self._in_key
            return "" if self._end in self._held else None
        key, self._held = found[1].strip(), self._held[found.end() :]
        properties = self._schema.get("properties")
        self._types = types_of(properties.get(key) if isinstance(properties, dict) else None, self._schema)
        self._num_keys += 1
        begin = f"{', ' if self._num_keys > 1 else '{'}{json.dumps(key, ensure_ascii=False)}: "
        if self._types != STRING:
            self._state = self._in_value
            return begin
        self._state = self._in_string
        return begin + '"'

    def _in_string(self) -> str | None:
        closing = self._tags.closing
        text, mark, self._held = _finder((self._tags.frame + closing, closing)).split(self._held)
        if mark:
            self._state = self._between
            return _escaped(text) + '"'
        return _escaped(text) or None

    def _in_value(self) -> str | None:
        raw, closing, rest = self._held.partition(self._tags.closing)
        if not closing:
            return None
        self._held, self._state = rest, self._between
        return as_json(raw.removesuffix(self._tags.frame), self._types)


def as_json(raw: str, types: frozenset[str]) -> str:
    """Return `raw` itself if it is JSON of one of the types, else as a JSON string."""
    text = _OF_PYTHON.get(raw.strip(), raw.strip())
    try:
        value = json.loads(text, parse_int=lambda _: 0, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(raw, ensure_ascii=False)
    is_quoted = isinstance(value, str) and "string" not in types
    fits = any(has_type(value, name) for name in types - STRING)
    return text if is_quoted or fits else json.dumps(raw, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
