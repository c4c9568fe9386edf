"""Search of marks in a text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NOTHING = "(?!)"  # matches no text


class MarkFinder:
    """Finder of the first of some marks."""

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
