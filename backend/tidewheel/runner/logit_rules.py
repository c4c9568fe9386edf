"""What single requests change in their logits: biases, forbidden tokens, and the tokens that penalties count."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tidewheel.batch import BoolArray, Float32Array, Int32Array, NewRow

FORBIDDEN = np.float32(-np.inf)


class BiasEntries(NamedTuple):
    """Values to add to the logits of one row."""

    token_ids: Int32Array
    values: Float32Array


class TokenCounts:
    """The distinct tokens of a request, whether its prompt has them, and how often it generated each."""

    def __init__(self, token_ids: Int32Array, num_prompt_tokens: int) -> None:
        prompt = np.unique(token_ids[:num_prompt_tokens])
        self._size = len(prompt)
        self._index = {token: i for i, token in enumerate(prompt.tolist())}
        capacity = 2 * self._size + 64
        self._ids = np.zeros(capacity, dtype=np.int32)
        self._counts = np.zeros(capacity, dtype=np.int32)
        self._in_prompt = np.zeros(capacity, dtype=np.bool_)
        self._ids[: self._size] = prompt
        self._in_prompt[: self._size] = True
        for token in token_ids[num_prompt_tokens:].tolist():
            self.add(token)

    def add(self, token_id: int) -> None:
        """A token was generated."""
        i = self._index.setdefault(token_id, self._size)
        if i == self._size:
            self._grow()
            self._ids[i] = token_id
            self._size += 1
        self._counts[i] += 1

    def columns(self) -> tuple[Int32Array, Int32Array, BoolArray]:
        """Token ids, times generated, whether in the prompt; valid until the next `add`."""
        return self._ids[: self._size], self._counts[: self._size], self._in_prompt[: self._size]

    def _grow(self) -> None:
        if self._size == len(self._ids):
            more = np.zeros_like(self._ids)
            self._ids = np.concatenate((self._ids, more))
            self._counts = np.concatenate((self._counts, more))
            self._in_prompt = np.concatenate((self._in_prompt, more.astype(np.bool_)))


class LogitRules:
    """The rules of one row that has any. `token_ids` may grow only through `observe`."""

    def __init__(self, new: NewRow) -> None:
        sampling = new.sampling
        words = new.bad_words_ids
        forbidden = [word[0] for word in words if len(word) == 1]
        self._always = BiasEntries(
            np.array([*sampling.logit_bias, *forbidden], dtype=np.int32),
            np.array([*sampling.logit_bias.values(), *(FORBIDDEN for _ in forbidden)], dtype=np.float32),
        )
        self._stop_ids = np.array(new.stop_token_ids, dtype=np.int32)
        self._first_stop_position = new.num_prompt_tokens + sampling.min_tokens
        self._sequences = [word for word in words if len(word) > 1]
        longest = max((len(word) - 1 for word in self._sequences), default=0)
        self._tail = new.token_ids[max(len(new.token_ids) - longest, 0) :].tolist()
        self._longest = longest
        self.counts = TokenCounts(new.token_ids, new.num_prompt_tokens) if sampling.has_penalties else None

    @staticmethod
    def needed(new: NewRow) -> bool:
        sampling = new.sampling
        return bool(sampling.logit_bias or sampling.min_tokens or new.bad_words_ids or sampling.has_penalties)

    @property
    def reads_history(self) -> bool:
        """Whether the rules depend on the tokens sampled so far."""
        return bool(self._sequences) or self.counts is not None

    def observe(self, token_id: int) -> None:
        """A token was sampled in this row."""
        if self.counts is not None:
            self.counts.add(token_id)
        if self._longest:
            self._tail = [*self._tail, token_id][-self._longest :]

    def biases(self, position: int) -> BiasEntries:
        """For the token at `position`: logit_bias, stop tokens before min_tokens, the last tokens of bad words.

        A bad word is a sequence of tokens; its last token is forbidden where the row, prompt included, ends with
        the others.
        """
        forbidden = [word[-1] for word in self._sequences if self._ends_with(word[:-1])]
        if position < self._first_stop_position:
            forbidden += self._stop_ids.tolist()
        if not forbidden:
            return self._always
        ids = np.array(forbidden, dtype=np.int32)
        return BiasEntries(
            np.concatenate((self._always.token_ids, ids)),
            np.concatenate((self._always.values, np.full(len(ids), FORBIDDEN))),
        )

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return tuple(self._tail[-len(tokens) :]) == tokens
