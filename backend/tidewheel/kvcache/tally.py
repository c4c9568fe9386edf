"""Counts by name, and the name with the highest."""

from __future__ import annotations

from collections import OrderedDict


class Tally:
    """Counts that change by one at a time. Every call is O(1)."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._names: dict[int, OrderedDict[str, None]] = {}  # by count, the one that changed longest ago first
        self._highest = 0

    def count(self, name: str) -> int:
        return self._counts.get(name, 0)

    def add(self, name: str, change: int) -> None:
        """`change` is 1 or -1."""
        old = self._counts.pop(name, 0)
        if old:
            del self._names[old][name]
            if not self._names[old]:
                del self._names[old]
        new = old + change
        if new:
            self._counts[name] = new
            self._names.setdefault(new, OrderedDict())[name] = None
        if new > self._highest or self._highest not in self._names:
            self._highest = new

    def leader(self) -> str:
        """Return the name with the highest count; of equal ones, the one that changed longest ago."""
        return next(iter(self._names[self._highest]))
