"""Drafts by prompt lookup: the tokens that followed an earlier occurrence of a row's last tokens.

Text that repeats (an edited file, an extract, JSON by schema) is drafted without a model. Of four candidates the
longest match wins: the place after the last step's match, and where the row's last four, two and one tokens occurred
last, by a hash table of the row, so that nothing is searched. Candidates are compared with the tokens, so a collision
in the table only loses a match.
"""

import numpy as np

from tidewheel.batch import Int32Array, Int64Array, RowArray
from tidewheel.scheduler.speculation import Proposals, Proposer

_WINDOW = 16  # tokens before an end that are seen at once
MAX_MATCH = _WINDOW - 1  # most tokens that are compared
# Kind of a proposal by the tokens that match: 1, 2, 3, 4, up to 6, 9, 14 and more.
MATCH_KINDS = np.searchsorted((1, 2, 3, 4, 6, 9, 14), np.arange(MAX_MATCH + 1)).astype(np.int32)
_RUN_SIZES = (4, 2, 1)
_SLOTS_PER_TOKEN = 2  # at least: with 4, drafts save 0.2 % more time, for twice the memory
_LEAST_SLOTS = 1024
_HASH_SHIFT = 32  # the lower bits of a product hang on few bits of its factors
_INDEX_STEP = 4096  # tokens indexed at once: their hashes fit a processor's cache
_ODD_FACTORS = np.random.default_rng(0).integers(1 << 62, size=(max(_RUN_SIZES), len(_RUN_SIZES))) * 2 + 1
# [longest run, sizes] factors of the last token, the one before, ...; 0 before the run of a size.
_HASH_WEIGHTS: Int64Array = np.where(np.arange(max(_RUN_SIZES))[:, None] < np.array(_RUN_SIZES), _ODD_FACTORS, 0)


class PromptLookup(Proposer):
    """Proposer that copies from a row's own tokens.

    Rows lie one after the other in one array of tokens, and an *end* is a place between two of its tokens. Tokens and
    table of a row take 12 to 24 bytes for each token of the longest context that the row has had.
    """

    is_free = True

    def __init__(self, num_rows: int, max_model_len: int, most: int) -> None:
        width = _WINDOW + max_model_len + 1  # a spare column takes the token after a full context
        tokens = np.zeros((num_rows, width), dtype=np.int32)
        tokens[:, :_WINDOW] = -1  # no token, so a match stops where its row begins
        self._tokens = tokens.reshape(-1)
        # [end, _WINDOW] the tokens before an end, last first. Ends count from the first that has so many before it.
        self._suffixes = np.lib.stride_tricks.sliding_window_view(self._tokens, _WINDOW)[:, ::-1]
        self._numbers = np.arange(num_rows)
        self._begins = self._numbers * width  # end before a row's first token
        self._ends = self._begins.copy()  # end of a row's last token
        self._distances = np.ones(num_rows, dtype=np.int64)  # from the end of the last match to the row's end
        self._most_slots = _num_slots(max_model_len + 1)
        self._table = np.zeros(num_rows * self._most_slots, dtype=np.min_scalar_type(len(self._tokens)))  # 0: none
        self._first_slots = self._numbers * self._most_slots
        self._masks = np.zeros(num_rows, dtype=np.int64)  # slots that a row uses, less one
        self._full_ends = self._ends.copy()  # end at which these are too few
        self._slots = np.zeros((num_rows, len(_RUN_SIZES)), dtype=np.int64)  # of the runs before a row's end
        self._counts = np.minimum(np.arange(MAX_MATCH + 1, dtype=np.int32), 1) * most
        # [period, most] indices of a proposal's tokens: text that loops goes on looping.
        self._offsets = np.arange(most) % np.arange(most + 1).clip(1)[:, None]

    def enter(self, row: int, token_ids: Int32Array) -> None:
        begin = self._begins[row]
        self._tokens[begin + _WINDOW : begin + _WINDOW + len(token_ids)] = token_ids
        self._ends[row] = begin + len(token_ids)
        self._distances[row] = 1
        self._index(row)

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        ends, slots_before = self._ends.take(rows), self._slots.take(rows, axis=0)
        is_later = rows[1:] == rows[:-1]  # token of the same row as the one before
        has_later = is_later.any()
        if has_later:
            numbers = np.arange(1, len(rows))
            ends[1:] += numbers - np.maximum.accumulate(np.where(is_later, 0, numbers))  # tokens of the row before it
        self._tokens[ends + _WINDOW] = token_ids
        slots = self._slots_of(self._suffixes[ends + 1], rows)
        if has_later:
            slots_before[1:][is_later] = slots[:-1][is_later]
        # Of equal indices, the last is assigned.
        self._table[slots_before] = ends[:, None]
        self._slots[rows] = slots
        self._ends[rows] = ends + 1
        is_full = ends >= self._full_ends.take(rows)
        for row in set(rows[is_full].tolist()):
            self._index(row)

    def propose(self, rows: RowArray) -> Proposals:
        ends = self._ends.take(rows)
        candidates = np.empty((1 + len(_RUN_SIZES), len(rows)), dtype=np.int64)
        np.subtract(ends, self._distances.take(rows), out=candidates[0])
        candidates[1:] = self._table[self._slots.take(rows, axis=0).T]
        differs = self._suffixes[candidates] != self._suffixes[ends]
        differs[..., MAX_MATCH] = True
        num_matching = differs.argmax(axis=-1)
        best = num_matching.argmax(axis=0), self._numbers[: len(rows)]  # the first of equals: a match goes on
        found, matches = candidates[best], num_matching[best]
        distances = ends - found
        self._distances[rows] = distances
        offsets = self._offsets.take(distances, axis=0, mode="clip")
        token_ids = self._tokens[(found + _WINDOW)[:, None] + offsets]
        return Proposals(self._counts[matches], token_ids, MATCH_KINDS[matches])

    def _slots_of(self, suffixes: Int32Array, rows: RowArray | int) -> Int64Array:
        """Return the slots [n, sizes] of the runs that `suffixes` [n, `_WINDOW`] begin with."""
        hashes = suffixes[..., : max(_RUN_SIZES)] @ _HASH_WEIGHTS
        return (hashes >> _HASH_SHIFT & self._masks[rows][..., None]) + self._first_slots[rows][..., None]

    def _index(self, row: int) -> None:
        """Fill the row's table anew, with slots for a quarter more tokens than it has."""
        begin, end, first_slot = self._begins[row], self._ends[row], self._first_slots[row]
        num_slots = min(_num_slots(int(end - begin) * 5 // 4 + 1), self._most_slots)
        self._masks[row] = num_slots - 1
        self._full_ends[row] = begin + num_slots // _SLOTS_PER_TOKEN
        self._table[first_slot : first_slot + num_slots] = 0
        for start in range(begin, end, _INDEX_STEP):
            ends = np.arange(start, min(start + _INDEX_STEP, end))
            self._table[self._slots_of(self._suffixes[ends[0] : ends[-1] + 1], row)] = ends[:, None]
        self._slots[row] = self._slots_of(self._suffixes[end], row)


def _num_slots(num_tokens: int) -> int:
    return max(_LEAST_SLOTS, 1 << (_SLOTS_PER_TOKEN * num_tokens - 1).bit_length())
