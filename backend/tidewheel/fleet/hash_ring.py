"""Consistent hashing (Karger et al., STOC 1997): a replica that comes or goes moves few keys."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from hashlib import blake2b

import numpy as np

from tidewheel.batch import BoolArray, RowArray

VIRTUAL_NODES = 64  # ring points per replica
_FIRST_LOOKS = (64, 1024)  # points looked at before all others: nearly always enough


class HashRing:
    """Points of replicas in the order of their hashes, as columns. The points of a replica are told by its slot."""

    def __init__(self) -> None:
        self._hashes = np.zeros(0, dtype=np.uint64)
        self._slots = np.zeros(0, dtype=np.intp)

    def join(self, replica: Hashable, slot: int) -> None:
        """Add the points of a name, whose text is hashed."""
        points = np.sort(np.array([_hash(f"replica {replica} point {n}") for n in range(VIRTUAL_NODES)], np.uint64))
        places = self._hashes.searchsorted(points)
        self._hashes = np.insert(self._hashes, places, points)
        self._slots = np.insert(self._slots, places, slot)

    def leave(self, slot: int) -> None:
        stays = self._slots != slot
        self._hashes, self._slots = self._hashes[stays], self._slots[stays]

    def first(self, key: str, accepts: Callable[[RowArray], BoolArray]) -> int | None:
        """Return the first accepted slot clockwise from the key, or None. `accepts` is asked for several slots."""
        slots = self._slots
        begin = int(self._hashes.searchsorted(np.uint64(_hash(key))))
        ends = [begin + length for length in _FIRST_LOOKS]
        for part in (slots[begin : ends[0]], slots[ends[0] : ends[1]], slots[ends[1] :], slots[:begin]):
            if len(part):
                accepted = accepts(part)
                place = int(accepted.argmax())
                if accepted[place]:
                    return int(part[place])
        return None


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
