"""Token ids to text as they come. Text that was returned never has to be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from tidewheel.batch import Int32Array
from tidewheel.frontend.tokenizer import Tokenizer

_REPLACEMENT = "�"  # a decoder's text for bytes that are no character, or not one yet
_MAX_CHARACTER_BYTES = 4
_PROMPT_CONTEXT = 6  # tokens
_MAX_HELD = 32  # tokens without a whole character at their end: their bytes are no text


class Detokenizer:
    """Text of one sequence, as a continuation of its prompt.

    Each call decodes a short window: the newest tokens, and before them the last tokens whose text is out, because
    the space before a token may depend on its predecessor. A character is held back until all its bytes are there.
    The results of `push` and the final `flush` join to the text that the whole sequence has after the prompt. (With
    byte-fallback vocabularies, text that was sent stays as it is even if later bytes change how its run decodes.)
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] | Int32Array = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._ids = self._context_of(prompt_ids)  # the window
        self._num_context = len(self._ids)  # leading tokens of the window whose text is out
        self._sent = len(self._decode(self._ids))  # leading characters of the window's text that are out

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        # Hidden tokens have no text, and must not let the window grow.
        new_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        if not new_ids:
            return ""
        self._ids += new_ids
        num_new = len(self._ids) - self._num_context
        for num_held in range(min(num_new, _MAX_CHARACTER_BYTES)):  # tokens that may be part of a character
            num_whole = len(self._ids) - num_held
            text = self._decode(self._ids[:num_whole])
            if not text.endswith(_REPLACEMENT):
                return self._emit(text, begin=self._num_context, end=num_whole)
        return self._emit_garbage() if num_new > _MAX_HELD else ""

    def flush(self) -> str:
        """Return what was held back. Call after the last token."""
        return self._emit(self._decode(self._ids), begin=self._num_context, end=len(self._ids))

    def _emit(self, text: str, *, begin: int, end: int) -> str:
        """Return what is new in the text of the first `end` tokens. Tokens from `begin` on stay as context."""
        new_text = text[self._sent :]
        self._sent = len(self._decode(self._ids[begin:end]))
        self._num_context = end - begin
        del self._ids[:begin]
        return new_text

    def _emit_garbage(self) -> str:
        """Return the text of a long run of undecodable tokens, except for a tail that may become a character."""
        text = self._decode(self._ids)
        num_held = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_CHARACTER_BYTES - 1)
        new_text = text[self._sent : len(text) - num_held]
        del self._ids[: -_MAX_HELD // 2]
        self._sent = len(self._decode(self._ids)) - num_held
        self._num_context = len(self._ids)
        return new_text

    def _context_of(self, prompt_ids: Sequence[int] | Int32Array) -> list[int]:
        """Return the last tokens of the prompt, beginning with a whole character."""
        tail = prompt_ids[-4 * _PROMPT_CONTEXT :]
        ids = [int(token_id) for token_id in tail if token_id not in self._hidden]
        for num_tokens in range(_PROMPT_CONTEXT, _PROMPT_CONTEXT + _MAX_CHARACTER_BYTES):
            if _REPLACEMENT not in self._decode(ids[-num_tokens:]):
                return ids[-num_tokens:]
        return ids[-_PROMPT_CONTEXT:]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
