"""Stop strings in a stream of text: a possible start of one is held back, so that the cut is exact.

A sequence ends at the first character that completes a stop string; if it completes several, the longest counts. So
the result does not depend on how the text was split into pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class StopStrings:
    """Stop strings of one request, which its sequences share.

    They are only sorted: a beginning of a string sorts right before it, so one binary search tells whether a text
    begins any of them. Following a text takes two searches per character on average.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._sorted = sorted(set(strings))
        self.first_chars = frozenset(string[0] for string in self._sorted)
        self._longest_first = tuple(sorted(self._sorted, key=len, reverse=True))

    def extend(self, held: str, char: str) -> str:
        """Return the longest end of `held + char` that begins a stop string, for a `held` that is such an end."""
        text = held + char
        while text and not self._begin_with(text):
            text = text[1:]
        return text

    def match_length(self, held: str) -> int:
        """Return the length of the longest stop string at the end of `held`, 0 if there is none."""
        if not held.endswith(self._longest_first):
            return 0
        return next(len(string) for string in self._longest_first if held.endswith(string))

    def _begin_with(self, text: str) -> bool:
        index = bisect_left(self._sorted, text)
        return index < len(self._sorted) and self._sorted[index].startswith(text)


class StopChecker:
    """Follows the output of one sequence."""

    def __init__(self, strings: StopStrings, *, include_in_output: bool = False) -> None:
        self._strings = strings
        self._include = include_in_output
        self._held = ""  # the longest end of the text so far that could be the start of a stop string
        self.is_hit = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Return the text that is certain to be output, and nothing after a hit.

        With `may_stop` false, a stop string that ends in `text` does not count.
        """
        if self.is_hit:
            return ""
        if not self._held and self._strings.first_chars.isdisjoint(text):
            return text
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._held = self._strings.extend(self._held, char)
            match_length = self._strings.match_length(self._held) if may_stop and self._held else 0
            if match_length:
                self.is_hit, self._held = True, ""
                return buffer[: end if self._include else end - match_length]
        return buffer[: len(buffer) - len(self._held)]

    def flush(self) -> str:
        """Return what was held back. Call after the last text."""
        text, self._held = self._held, ""
        return text
