"""Consistent hashing (Karger et al., STOC 1997): a replica that comes or goes moves few keys."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from hashlib import blake2b
from operator import itemgetter
from typing import Generic

from tidewheel.fleet.router import T

VIRTUAL_NODES = 64  # ring points per replica


class HashRing(Generic[T]):
    def __init__(self, replicas: Iterable[T] = ()) -> None:
        """`replicas`: names, or numbers, whose text is hashed."""
        self._points: list[tuple[int, T]] = []
        self._hashes: list[int] = []
        self._members: set[T] = set()
        self._is_sorted = True
        for replica in replicas:
            self.join(replica)

    def join(self, replica: T) -> None:
        if replica in self._members:
            return
        self._members.add(replica)
        self._points += [(_hash(f"replica {replica} point {point}"), replica) for point in range(VIRTUAL_NODES)]
        self._is_sorted = False  # sorted before the next look, so that many may join at once

    def leave(self, replica: T) -> None:
        self._members.discard(replica)
        self._points = [point for point in self._points if point[1] != replica]
        self._is_sorted = False

    def owner(self, key: str) -> T:
        """Return the replica of a key; the ring must not be empty."""
        return self._points[self._position(key)][1]

    def first(self, key: str, accepts: Callable[[T], bool]) -> T | None:
        """Return the first accepting replica clockwise from the key, or None."""
        if not self._points:
            return None
        start, refused = self._position(key), set[T]()
        for offset in range(len(self._points)):
            replica = self._points[(start + offset) % len(self._points)][1]
            if replica in refused:
                continue
            if accepts(replica):
                return replica
            refused.add(replica)
            if len(refused) == len(self._members):
                return None
        return None

    def _position(self, key: str) -> int:
        if not self._is_sorted:
            self._points.sort(key=itemgetter(0))
            self._hashes = [point for point, _ in self._points]
            self._is_sorted = True
        return bisect_left(self._hashes, _hash(key)) % len(self._hashes)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
