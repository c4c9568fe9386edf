"""Slots of replicas that Ray Serve keeps for this gateway: one for all requests of a replica.

Ray Serve ends a replica that goes once none of its slots is reserved. One is enough for that, and asking for one
takes longer than all else that a gateway does for a short request. So the first request asks, and the last one leaves
the slot for others to find.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

LINGER_S = 5.0  # that a slot without requests is kept, as long as its replica gets new ones
_RELEASE_S = 2.0  # for slots to be given back at the end


class Reserved(Protocol):
    """A slot at Ray, from the asking on: see `Reservation`."""

    @property
    def has_failed(self) -> bool: ...

    async def wait(self, is_there: Callable[[], bool]) -> None: ...

    async def release(self) -> None: ...


class Slot:
    """Slot of one replica. Its requests count themselves with `Slots.take` and `Slots.give_back`."""

    def __init__(self, replica: str, reserved: Reserved) -> None:
        self.replica = replica
        self.reserved = reserved
        self.num_users = 0
        self.expiry: asyncio.TimerHandle | None = None  # while nothing uses it


class Slots:
    """Owner of the slots. `reserve` asks for one of a replica, by its id."""

    def __init__(self, reserve: Callable[[str], Reserved], linger_s: float = LINGER_S) -> None:
        self._reserve = reserve
        self._linger_s = linger_s
        self._slots: dict[str, Slot] = {}  # that new requests find, by replica id
        self._releases: set[asyncio.Task[None]] = set()

    def take(self, replica: str) -> Slot:
        """Return the slot of a replica, asked for if there is none yet. `give_back` it."""
        slot = self._slots.get(replica)
        if slot is None or slot.reserved.has_failed:
            slot = self._slots[replica] = Slot(replica, self._reserve(replica))
        if slot.expiry is not None:
            slot.expiry.cancel()
            slot.expiry = None
        slot.num_users += 1
        return slot

    def give_back(self, slot: Slot) -> None:
        slot.num_users -= 1
        if slot.num_users:
            return
        if self._is_current(slot) and not slot.reserved.has_failed:
            slot.expiry = asyncio.get_running_loop().call_later(self._linger_s, self._drop, slot)
        else:
            self._drop(slot)

    def keep_only(self, replicas: Collection[str]) -> None:
        """Forget the slots of replicas that are going: each is released with its last request."""
        for slot in [slot for replica, slot in self._slots.items() if replica not in replicas]:
            del self._slots[slot.replica]
            if not slot.num_users:
                self._drop(slot)

    async def close(self) -> None:
        """Release all, since one that is not given back would keep its replica."""
        for slot in list(self._slots.values()):
            self._drop(slot)
        if self._releases:
            await asyncio.wait(self._releases, timeout=_RELEASE_S)

    def release(self, reserved: Reserved) -> None:
        """Give it back to Ray. The answer does not wait for it."""
        task = asyncio.create_task(reserved.release())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _drop(self, slot: Slot) -> None:
        if slot.expiry is not None:
            slot.expiry.cancel()
        if self._is_current(slot):
            del self._slots[slot.replica]
        self.release(slot.reserved)

    def _is_current(self, slot: Slot) -> bool:
        return self._slots.get(slot.replica) is slot
