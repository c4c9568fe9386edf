"""Incremental text of token ids, up to the first character that completes a stop string. Nothing is taken back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from copy import copy

from tidewheel.batch import Int32Array
from tidewheel.frontend.tokenizer import Tokenizer

_REPLACEMENT = "�"  # of bytes that are no character
_MAX_CHARACTER_BYTES = 4
_PROMPT_CONTEXT = 6  # tokens
_Ids = Sequence[int] | Int32Array
_MAX_HELD = 32  # tokens


class Detokenizer:
    """Text of one sequence after its prompt: the joined results of `push` and `flush`.

    Each call decodes the new tokens, after the last emitted ones if the space before a token may depend on its
    predecessor. Incomplete characters are held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: _Ids = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._ids = self._context_of(prompt_ids)  # window
        self._num_context = len(self._ids)  # leading tokens with emitted text
        self._sent = len(self._decode(self._ids))  # emitted leading characters

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._hidden.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        if not token_ids:
            return ""
        self._ids += token_ids
        num_new = len(self._ids) - self._num_context
        for num_held in range(min(num_new, _MAX_CHARACTER_BYTES)):  # tokens of a partial character
            num_whole = len(self._ids) - num_held
            text = self._decode(self._ids[:num_whole])
            if not text.endswith(_REPLACEMENT):
                return self._emit(text, begin=self._num_context, end=num_whole)
        return self._emit_garbage() if num_new > _MAX_HELD else ""

    def copy(self) -> Detokenizer:
        other = copy(self)
        other._ids = self._ids.copy()
        return other

    def flush(self) -> str:
        return self._emit(self._decode(self._ids), begin=self._num_context, end=len(self._ids))

    def _emit(self, text: str, *, begin: int, end: int) -> str:
        """Return new text of the first `end` tokens. Those from `begin` on stay as context."""
        new_text = text[self._sent :]
        if self._tokenizer.joins_bytes:
            begin = end
        self._sent = len(self._decode(self._ids[begin:end])) if begin < end else 0
        self._num_context = end - begin
        del self._ids[:begin]
        return new_text

    def _emit_garbage(self) -> str:
        """Return the text of a long undecodable run, without a partial character."""
        text = self._decode(self._ids)
        num_held = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_CHARACTER_BYTES - 1)
        new_text = text[self._sent : len(text) - num_held]
        del self._ids[: -_MAX_HELD // 2]
        self._sent = len(self._decode(self._ids)) - num_held
        self._num_context = len(self._ids)
        return new_text

    def _context_of(self, prompt_ids: _Ids) -> list[int]:
        """Return the last prompt tokens, from a whole character on."""
        tail = prompt_ids[-4 * _PROMPT_CONTEXT :]
        ids = [int(token_id) for token_id in tail if token_id not in self._hidden]
        for num_tokens in range(_PROMPT_CONTEXT, _PROMPT_CONTEXT + _MAX_CHARACTER_BYTES):
            if _REPLACEMENT not in self._decode(ids[-num_tokens:]):
                return ids[-num_tokens:]
        return ids[-_PROMPT_CONTEXT:]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StopStrings:
    """Stop strings of one request, sorted, so that one binary search finds whether a text begins any."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._sorted = sorted(set(strings))
        self.first_chars = frozenset(string[0] for string in self._sorted)
        self._longest_first = tuple(sorted(self._sorted, key=len, reverse=True))

    def extend(self, held: str, char: str) -> str:
        """Return the longest end of `held + char` that begins a stop string. `held` must be such an end."""
        text = held + char
        while text and not self._begin_with(text):
            text = text[1:]
        return text

    def match_length(self, held: str) -> int:
        """Return the length of the longest stop string that ends `held`, or 0."""
        if not held.endswith(self._longest_first):
            return 0
        return next(len(string) for string in self._longest_first if held.endswith(string))

    def _begin_with(self, text: str) -> bool:
        index = bisect_left(self._sorted, text)
        return index < len(self._sorted) and self._sorted[index].startswith(text)


class StopChecker:
    def __init__(self, strings: StopStrings, *, include_in_output: bool = False) -> None:
        self._strings = strings
        self._include = include_in_output
        self._held = ""  # longest end that may begin a stop string
        self.is_hit = False

    def may_change(self, text: str) -> bool:
        """Return whether `push` may hold or stop the text."""
        return bool(self._held) or not self._strings.first_chars.isdisjoint(text)

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Return text that is certain. Without `may_stop`, stop strings that end in `text` do not count."""
        if self.is_hit:
            return ""
        if not self.may_change(text):
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
        text, self._held = self._held, ""
        return text
