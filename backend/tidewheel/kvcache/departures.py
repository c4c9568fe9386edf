from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


class Departures:
    """Counter of unkept blocks that only departing rows hold. Calls are O(blocks of the row)."""

    def __init__(self, ref_count: Sequence[int], tables: Mapping[int, Sequence[int]], kept: set[int]) -> None:
        self._ref_count = ref_count
        self._tables = tables
        self._kept = kept
        self._holders: Counter[int] = Counter()  # departing rows per block

    def add(self, row: int) -> int:
        """Add a departing row; return how many more blocks it frees."""
        self._holders.update(self._tables[row])
        return self.num_freed(row)

    def take_back(self, row: int) -> None:
        self._holders.subtract(self._tables[row])

    def num_freed(self, row: int) -> int:
        """Return how many blocks of the row all added rows free."""
        holders, ref_count, kept = self._holders, self._ref_count, self._kept
        return sum([holders[b] == ref_count[b] and b not in kept for b in self._tables[row]])
