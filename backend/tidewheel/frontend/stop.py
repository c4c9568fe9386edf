"""Stop strings in a stream of text: what could be the start of one is held back, and the cut is exact.

A request ends at the first character after which its output ends with a stop string; where several end there, the
longest counts. So the result does not depend on how the text was split into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """An Aho-Corasick automaton (Aho and Corasick 1975): one step a character, however many strings there are.

    A state is the longest suffix of the text so far that begins some stop string; `depth` is its length.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.match_length = [0]  # length of the longest stop string that ends in this state; 0: none
        for string in strings:
            self._insert(string)
        self._link()

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match_length.append(0)
            state = self._next[state][char]
        self.match_length[state] = len(string)

    def _link(self) -> None:
        """Breadth first, so that the shorter suffix that a state falls back to is complete before it."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                self.match_length[child] = self.match_length[child] or self.match_length[self._fail[child]]
                queue.append(child)


class StopChecker:
    """Follows the output of one request."""

    def __init__(self, strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self._automaton = StopStrings(strings)
        self._include = include_in_output
        self._state = 0
        self._held = ""  # could be the start of a stop string
        self.is_hit = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Text that is certain to be output. `may_stop` false: a stop string that ends in `text` does not count.

        After a hit nothing is output any more.
        """
        if self.is_hit:
            return ""
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._automaton.step(self._state, char)
            match_length = self._automaton.match_length[self._state]
            if match_length and may_stop:
                self.is_hit, self._held = True, ""
                return buffer[: end if self._include else end - match_length]
        keep = len(buffer) - self._automaton.depth[self._state]
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> str:
        """What was held back; nothing more will come."""
        text, self._held = self._held, ""
        return text
