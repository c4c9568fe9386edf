from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from tidewheel.errors import InternalError, require


class HostTier:
    """KV blocks in host memory: slots ``0 … num_slots - 1``, found by content digest, each in one of three states:

    empty     no content
    idle      `lookup` finds it, `insert` may evict it, least recently used first
    pinned    a copy to or from it is queued or in flight
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise InternalError(f"a host tier cannot have {num_slots} slots")
        self.num_slots = num_slots
        self._slots: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * num_slots
        self._pins = [0] * num_slots
        self._empty = list(range(num_slots - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free_slots(self) -> int:
        return len(self._empty) + len(self._idle)

    def lookup(self, key: bytes) -> int | None:
        return self._slots.get(key)

    def lookup_prefix(self, keys: Iterable[bytes]) -> tuple[bytes, ...]:
        return tuple(takewhile(self._slots.__contains__, keys))

    def key_of(self, slot: int) -> bytes | None:
        return self._keys[slot]

    def insert(self, key: bytes) -> int | None:
        """Return a slot for new content, pinned once; None if all slots are pinned."""
        if key in self._slots:
            raise InternalError("a content would be in two slots of the host tier")
        if self._empty:
            slot = self._empty.pop()
        elif self._idle:
            slot, _ = self._idle.popitem(last=False)
            self._forget(slot)
        else:
            return None
        self._slots[key] = slot
        self._keys[slot] = key
        self._pins[slot] = 1
        return slot

    def pin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._pins[slot] == 0:
                if self._keys[slot] is None:
                    raise InternalError(f"host slot {slot} is empty: there is nothing to pin")
                del self._idle[slot]
            self._pins[slot] += 1

    def unpin(self, slots: Sequence[int]) -> None:
        """Remove one pin of each slot; the first unpinned is evicted first."""
        for slot in slots:
            if self._pins[slot] == 0:
                raise InternalError(f"host slot {slot} is unpinned more often than it was pinned")
            self._pins[slot] -= 1
            if self._pins[slot] > 0:
                continue
            if self._keys[slot] is None:
                self._empty.append(slot)
            else:
                self._idle[slot] = None

    def drop(self, key: bytes | None) -> None:
        """Forget the content of a key; a pinned slot becomes empty after its copy."""
        slot = None if key is None else self._slots.get(key)
        if slot is None:
            return
        self._forget(slot)
        if self._pins[slot] == 0:
            del self._idle[slot]
            self._empty.append(slot)

    def check_invariants(self) -> None:
        pinned = [slot for slot, count in enumerate(self._pins) if count > 0]
        states = (*self._empty, *self._idle, *pinned)
        require(len(set(states)) == len(states) == self.num_slots, "a host slot is in no state or in two")
        require(all(self._keys[slot] is None for slot in self._empty), "an empty host slot has a content")
        require(all(self._keys[slot] is not None for slot in self._idle), "an idle host slot has no content")
        keyed = {key: slot for slot, key in enumerate(self._keys) if key is not None}
        require(keyed == self._slots, "host slots and their contents disagree")

    def _forget(self, slot: int) -> None:
        key = self._keys[slot]
        if key is None:
            raise InternalError(f"host slot {slot} has no content to forget")
        del self._slots[key]
        self._keys[slot] = None
