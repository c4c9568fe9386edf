"""Logit biases, stop tokens before `min_tokens` and forbidden words of a request.

They do not depend on sampled tokens; the device compares words with them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tidewheel.batch import Float32Array, Int32Array, NewRow
from tidewheel.sampling import LogitBias

FORBIDDEN = np.float32(-np.inf)


class BiasEntries(NamedTuple):
    """Values to add to one row's logits."""

    token_ids: Int32Array
    values: Float32Array


NO_BIASES = BiasEntries(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))


class WordEntries(NamedTuple):
    """Token sequences that one row must not complete."""

    lengths: Int32Array
    token_ids: Int32Array  # all words, concatenated


class LogitRules:
    def __init__(self, new: NewRow) -> None:
        self._always = NO_BIASES
        if new.sampling.logit_bias:
            bias = LogitBias.of(new.sampling.logit_bias)
            self._always = BiasEntries(bias.token_ids, bias.amounts)
        stops = np.array(new.stop_token_ids, dtype=np.int32)
        self._at_first = BiasEntries(
            np.concatenate((self._always.token_ids, stops)),
            np.concatenate((self._always.values, np.full(len(stops), FORBIDDEN))),
        )
        self._first_stop_position = new.num_prompt_tokens + new.sampling.min_tokens
        words = sorted(new.bad_words_ids, key=len)
        self._words = WordEntries(
            np.array([len(word) for word in words], dtype=np.int32),
            np.array([token for word in words for token in word], dtype=np.int32),
        )

    @staticmethod
    def needed(new: NewRow) -> bool:
        return bool(new.sampling.logit_bias or new.sampling.min_tokens or new.bad_words_ids)

    def biases(self, position: int) -> BiasEntries:
        """Return the biases at `position`, which forbid stop tokens before `min_tokens`."""
        return self._at_first if position < self._first_stop_position else self._always

    def words(self, position: int) -> WordEntries:
        """Return the words short enough to end at `position`."""
        lengths, token_ids = self._words
        count = int(np.searchsorted(lengths, position + 1, side="right"))
        return WordEntries(lengths[:count], token_ids[: int(lengths[:count].sum())])
