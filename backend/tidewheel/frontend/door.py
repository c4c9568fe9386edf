"""The front end's copy of the bound on the engine's waiting set, and two ways to act on it.

The engine reports in `Room` how full its waiting set is and which requests it has received. A door adds the requests
sent since, so that a full set shows before the engine's step ends. Front ends of one engine do not know each other's
newest requests, so the engine decides about every request.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import msgspec

from tidewheel.engine.messages import AddRequest, Room
from tidewheel.errors import WaitingSetFull
from tidewheel.request import Priority


class _Claim(NamedTuple):
    """Waiting places that a request takes."""

    num_requests: int
    num_tokens: int
    priority: int = 0  # 0: not known

    @classmethod
    def of(cls, message: AddRequest) -> _Claim:
        return cls(message.n, message.n * (len(message.prompt) // 4), message.priority)


_NOTHING = _Claim(0, 0)


class Door:
    """A counter of claims. Any thread may call. Each call takes constant time per request that it names."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._room: Room | None = None  # the engine's last report
        self._unheard: dict[int, _Claim] = {}  # by key; not part of that report
        self._num_requests = 0  # sums over `_unheard`
        self._num_tokens = 0
        self._num_by_class = [0] * (max(Priority) + 1)  # index 0 counts claims without a class
        self._held: dict[int, _Claim] = {}  # refused by the engine, in that order

    def enter(self, key: int) -> None:
        """Note a request that was submitted, whose size is not known yet."""

    def claim(self, message: AddRequest) -> None:
        """Count a request that is about to be sent, or raise `WaitingSetFull`."""
        claim = _Claim.of(message)
        with self._changed:
            if self._room is not None:
                self._check(self._room, claim)
            self._count(message.key, claim)

    def hold(self, message: AddRequest) -> bool:
        """Return whether a request that the engine had no room for waits until `offer` returns it."""
        return message.key in self._held

    def offer(self) -> list[int]:
        """Return the held requests that now have room, and count them as sent."""
        keys = []
        with self._changed:
            while self._held and self._fits(claim := next(iter(self._held.values()))):
                keys.append(next(iter(self._held)))
                del self._held[keys[-1]]
                self._count(keys[-1], claim)
        return keys

    def wait(self) -> None:
        """Return when one more request may be submitted."""

    def hear(self, room: Room | None) -> None:
        """Take the engine's report. None: it is gone, and the next one starts with an empty waiting set."""
        with self._changed:
            if room is not None:
                self._room = room
                for key in room.received:
                    self._count(key, None)
            elif self._room is not None:
                self._room = msgspec.structs.replace(self._room, num_requests=0, num_tokens=0)
            self._changed.notify_all()

    def forget(self, key: int) -> None:
        """Drop a request that is over or was not sent."""
        with self._changed:
            self._held.pop(key, None)
            self._count(key, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Let `wait` return from now on."""

    def _check(self, room: Room, claim: _Claim) -> None:
        """Raise `WaitingSetFull` if the request may not be sent."""

    def _count(self, key: int, claim: _Claim | None) -> None:
        """Replace the claim of a request. None: the engine has heard of it, or never will."""
        before, after = self._unheard.pop(key, _NOTHING), claim or _NOTHING
        if claim is not None:
            self._unheard[key] = claim
        self._num_requests += after.num_requests - before.num_requests
        self._num_tokens += after.num_tokens - before.num_tokens
        self._num_by_class[before.priority] -= 1
        self._num_by_class[after.priority] += 1

    def _fits(self, claim: _Claim) -> bool:
        room = self._room
        return room is None or (
            room.num_requests + self._num_requests + claim.num_requests <= room.max_requests
            and room.num_tokens + self._num_tokens + claim.num_tokens <= room.max_tokens
        )


class RefusingDoor(Door):
    """Refuses at once the requests that the engine would refuse after its step."""

    def _check(self, room: Room, claim: _Claim) -> None:
        lowest = max(room.lowest_class, *(priority for priority, num in enumerate(self._num_by_class) if num), 0)
        if claim.priority < lowest or self._fits(claim):
            return  # it has room, or may take the place of a request of a lower class
        num_waiting = room.num_requests + self._num_requests
        full = f"{num_waiting} of {room.max_requests} requests"
        if num_waiting + claim.num_requests <= room.max_requests:
            num_tokens = room.num_tokens + self._num_tokens
            full = f"{num_tokens} of {room.max_tokens} tokens, and this prompt has {claim.num_tokens}"
        raise WaitingSetFull(f"waiting set is full: {full}", retry_after_ms=room.retry_after_ms)


class HoldingDoor(Door):
    """Holds the server's own queue back while the waiting set is full, and refuses nothing.

    Requests count from their submission on. If the engine has no room for one, because another front end was faster,
    it is held, and no more are let in until it fits.
    """

    _is_closed = False

    def enter(self, key: int) -> None:
        with self._changed:
            self._count(key, _Claim(1, 0))

    def hold(self, message: AddRequest) -> bool:
        with self._changed:
            self._held[message.key] = _Claim.of(message)
        return super().hold(message)

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (not self._held and self._fits(_Claim(1, 1))))

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
