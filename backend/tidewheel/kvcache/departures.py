"""Counts the blocks that come free if several rows leave together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


class Departures:
    """Counts the blocks that only departing rows hold, without those in `kept`. Each call is O(blocks of the row)."""

    def __init__(self, ref_count: Sequence[int], tables: Mapping[int, Sequence[int]], kept: set[int]) -> None:
        self._ref_count = ref_count
        self._tables = tables
        self._kept = kept
        self._holders: Counter[int] = Counter()  # departing rows that hold each block

    def add(self, row: int) -> int:
        """Let the row depart, and return how many more blocks are free then."""
        self._holders.update(self._tables[row])
        return self.num_freed(row)

    def take_back(self, row: int) -> None:
        """Let an added row stay."""
        self._holders.subtract(self._tables[row])

    def num_freed(self, row: int) -> int:
        """Return how many blocks of the row are free if all added rows leave."""
        holders, ref_count, kept = self._holders, self._ref_count, self._kept
        return sum([holders[b] == ref_count[b] and b not in kept for b in self._tables[row]])
