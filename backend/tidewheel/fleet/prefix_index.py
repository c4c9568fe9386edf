from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_KNOWN = 1 << 20
MAX_KNOWN_OF_ONE = 1 << 14
_MAX_STAIRS = 4


class CachedDepths(NamedTuple):
    """Number of a prompt's leading chunks (equal pieces) cached by replica `slot`: `of_level[levels[slot]]`."""

    of_level: tuple[int, ...]
    levels: npt.NDArray[np.uint8]


class PrefixIndex:
    """Index of the prompt chunks that each replica has cached, least recently used first.

    A chunk is a hash of `chunk_hashes`, a slot a replica's index in `Router`.
    """

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._holders: dict[int, int] = {}  # chunk → bits of slots
        self._stamps: dict[int, dict[int, int]] = {}  # slot → chunk → time of last use
        self._now = 0

    def __len__(self) -> int:
        return sum(map(len, self._stamps.values()))

    def join(self, slot: int) -> None:
        self._stamps[slot] = {}
        for other in self._stamps:
            self._trim(other)

    def leave(self, slot: int) -> None:
        for chunk in list(self._stamps[slot]):
            self._drop(slot, chunk)
        del self._stamps[slot]

    def known(self, slot: int, chunks: Sequence[int]) -> tuple[int, ...]:
        """Return the last-use stamp of each leading chunk that the replica has cached."""
        stamps, found = self._stamps[slot], []
        for chunk in chunks:
            if (stamp := stamps.get(chunk)) is None:
                break
            found.append(stamp)
        return tuple(found)

    def depths(self, chunks: Sequence[int], num_slots: int) -> CachedDepths | None:
        """Return each replica's number of leading cached chunks, of the `_MAX_STAIRS` largest; None if all are 0."""
        stairs = self._stairs(chunks)[-_MAX_STAIRS:]
        if not stairs:
            return None
        num_bytes = (num_slots + 7) // 8
        raw = np.frombuffer(b"".join(slots.to_bytes(num_bytes, "little") for _, slots in stairs), dtype=np.uint8)
        bits = np.unpackbits(raw.reshape(len(stairs), num_bytes), axis=1, count=num_slots, bitorder="little")
        levels = bits[0]
        for higher in bits[1:]:  # a slot of one stair is on all earlier ones
            levels += higher
        return CachedDepths((0, *(depth for depth, _ in stairs)), levels)

    def _stairs(self, chunks: Sequence[int]) -> list[tuple[int, int]]:
        """Return pairs (n, bit set of the slots with at least n leading chunks), n ascending."""
        stairs: list[tuple[int, int]] = []
        slots, holders = -1, self._holders
        for depth, chunk in enumerate(chunks):
            left = slots & holders.get(chunk, 0)
            if left != slots and depth:
                stairs.append((depth, slots))
            slots = left
            if not slots:
                return stairs
        return [*stairs, (len(chunks), slots)] if chunks else stairs

    def touch(self, slot: int, chunks: Sequence[int]) -> int:
        """Record the use of chunks by a replica, and return the stamp of this use."""
        self._now += 1
        stamps, holders, bit = self._stamps[slot], self._holders, 1 << slot
        for chunk in reversed(chunks):  # the first chunk, which most prompts share, is forgotten last
            if stamps.pop(chunk, None) is None:
                holders[chunk] = holders.get(chunk, 0) | bit
            stamps[chunk] = self._now
        self._trim(slot)
        return self._now

    def forget(self, slot: int, chunks: Sequence[int], stamp: int) -> None:
        """Remove chunks of a replica, unless used after `stamp`."""
        stamps = self._stamps[slot]
        for chunk in chunks:
            if stamps.get(chunk) == stamp:
                self._drop(slot, chunk)

    def forget_until(self, slot: int, stamp: int) -> None:
        """Remove all chunks last used up to the stamp, as an LRU cache evicts the oldest first."""
        stamps = self._stamps[slot]
        while stamps and next(iter(stamps.values())) <= stamp:
            self._drop(slot, next(iter(stamps)))

    def _trim(self, slot: int) -> None:
        limit = min(MAX_KNOWN_OF_ONE, self._max_known // len(self._stamps))
        stamps = self._stamps[slot]
        while len(stamps) > limit:
            self._drop(slot, next(iter(stamps)))

    def _drop(self, slot: int, chunk: int) -> None:
        del self._stamps[slot][chunk]
        if left := self._holders[chunk] & ~(1 << slot):
            self._holders[chunk] = left
        else:
            del self._holders[chunk]
