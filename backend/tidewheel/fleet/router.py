import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from tidewheel.batch import Float64Array
from tidewheel.request import Priority

T = TypeVar("T", bound=Hashable)  # a replica's name
LOAD_FACTOR = 1.25  # largest load, relative to the mean
MAX_CHUNKS = 512  # of one prompt
_FIRST_SLOTS = 8


class RouteRequest(NamedTuple):
    session: str = ""  # unique, also among tenants; empty: none
    priority: Priority = Priority.NORMAL
    num_tokens: int = 0  # or an estimate
    chunks: tuple[int, ...] = ()  # result of `chunk_hashes`
    chunk_tokens: int = 1
    due: float = math.inf  # deadline, on the router's clock
    tells_start: bool = True  # `started` is called at the first token, not at the end
    busy_cost: float = math.inf  # of a replica that was too busy, in `TieredRouter`
    first_token_due: float = math.inf  # by the request's own objective, on the router's clock


@dataclass(slots=True, eq=False)
class RoutedRequest(Generic[T]):
    replica: T
    request: RouteRequest
    epoch: int = 0  # the replica's stay in the fleet
    waiting_tokens: int = 0  # counted until the first token
    has_started: bool = False
    stamp: int = 0  # in the `PrefixIndex`
    known: tuple[int, ...] = ()  # earlier stamps of cached chunks
    # Of `TieredRouter`:
    sent: float = 0.0
    num_ahead: int = 0  # unstarted requests of its class and above
    waited_s: float | None = None  # before the start, if the replica has reported it


def load_bound(num_requests: float, num_replicas: int, factor: float = LOAD_FACTOR) -> int:
    """Return a replica's most open requests when a request joins `num_requests` others.

    Mirrokni et al., SODA 2018.
    """
    return math.ceil(factor * (num_requests + 1) / num_replicas)


class Router(Generic[T]):
    """Chooser of a replica for each request, here of the least loaded. A request is open from `chosen` to `ended`.

    A slot is a replica's index in the arrays, from `join` to `leave`; a free slot has infinite `num_open` and
    `waiting`.
    """

    def __init__(self) -> None:
        self.slots: dict[T, int] = {}
        self.names: list[T | None] = []
        self.num_open: Float64Array = np.zeros(0)
        self.waiting: Float64Array = np.zeros((len(Priority), 0))  # uncomputed prompt tokens, of a class and above
        self.running: Float64Array = np.zeros(0)
        self.total_open = 0.0
        self.usual_open = 0.0  # mean of `total_open` over about as many requests
        self.total_waiting: Float64Array = np.zeros(len(Priority))
        self._epochs: list[int] = []
        self._num_joined = 0

    def join(self, replica: T) -> None:
        if replica in self.slots:
            return
        if None not in self.names:
            self._grow()
        slot = self.names.index(None)
        self._num_joined += 1
        self.slots[replica], self.names[slot], self._epochs[slot] = slot, replica, self._num_joined
        self.num_open[slot] = self.waiting[:, slot] = 0.0
        self._add(replica, slot)

    def leave(self, replica: T) -> None:
        if (slot := self.slots.pop(replica, None)) is None:
            return
        self.total_open -= float(self.num_open[slot])
        self.total_waiting -= self.waiting[:, slot]
        self.names[slot] = None
        self.num_open[slot] = self.waiting[:, slot] = math.inf
        self.running[slot] = 0.0
        self._remove(slot)

    def _add(self, replica: T, slot: int) -> None:
        pass

    def _remove(self, slot: int) -> None:
        pass

    def _learn(self, routed: RoutedRequest[T], slot: int, num_cached_tokens: int | None) -> None:
        """Hook of subclasses, called at a request's first token and at its end."""

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:  # noqa: ARG002
        """Return a replica, or None if all are excluded. Does not count the request."""
        if not self.slots:
            return None
        num_open = self.open_without(excluded)
        slot = int(num_open.argmin())
        return self.names[slot] if np.isfinite(num_open[slot]) else None

    def chosen(self, request: RouteRequest, replica: T) -> RoutedRequest[T]:
        """Count a request at the replica to which it was sent."""
        return self.count(request, replica, request.num_tokens)

    def started(self, routed: RoutedRequest[T], num_cached_tokens: int | None = None) -> None:
        """Record a request's first token, and its cached prompt tokens if known. Repeated calls do nothing."""
        if routed.has_started:
            return
        routed.has_started = True
        if (slot := self.slot_of(routed)) is not None:
            self._wait(slot, routed.request.priority, -routed.waiting_tokens)
            self.running[slot] += routed.request.num_tokens
            self._learn(routed, slot, num_cached_tokens)

    def ended(self, routed: RoutedRequest[T], num_cached_tokens: int | None = None) -> None:
        """Remove a request from the counts. Pass `num_cached_tokens` here or to `started`."""
        if (slot := self.slot_of(routed)) is None:
            return
        self.num_open[slot] -= 1
        self._change_open(-1)
        if routed.has_started:
            self.running[slot] -= routed.request.num_tokens
        else:
            self._wait(slot, routed.request.priority, -routed.waiting_tokens)
        self._learn(routed, slot, num_cached_tokens)

    def open_without(self, excluded: Collection[T]) -> Float64Array:
        """Return open requests by slot, infinite for excluded replicas."""
        if not excluded:
            return self.num_open
        num_open = self.num_open.copy()
        for replica in excluded:
            if (slot := self.slots.get(replica)) is not None:
                num_open[slot] = math.inf
        return num_open

    def count(self, request: RouteRequest, replica: T, num_uncached_tokens: int) -> RoutedRequest[T]:
        slot = self.slots[replica]
        self.num_open[slot] += 1
        self._change_open(1)
        self._wait(slot, request.priority, num_uncached_tokens)
        return RoutedRequest(replica, request, self._epochs[slot], num_uncached_tokens)

    def slot_of(self, routed: RoutedRequest[T]) -> int | None:
        slot = self.slots.get(routed.replica)
        return slot if slot is not None and self._epochs[slot] == routed.epoch else None

    def _change_open(self, change: int) -> None:
        self.total_open += change
        self.usual_open += (self.total_open - self.usual_open) / (1.0 + max(self.total_open, self.usual_open))

    def _wait(self, slot: int, priority: Priority, num_tokens: int) -> None:
        self.waiting[priority - 1 :, slot] += num_tokens
        self.total_waiting[priority - 1 :] += num_tokens

    def _grow(self) -> None:
        num_new = max(len(self.names), _FIRST_SLOTS)
        self.names += [None] * num_new
        self._epochs += [0] * num_new
        self.num_open = np.concatenate((self.num_open, np.full(num_new, math.inf)))
        self.running = np.concatenate((self.running, np.zeros(num_new)))
        self.waiting = np.concatenate((self.waiting, np.full((len(Priority), num_new), math.inf)), axis=1)


def chunk_hashes(data: bytes | memoryview, chunk_bytes: int, tenant: str = "", salt: str = "") -> tuple[int, ...]:
    """Return chained hashes of a prompt's full chunks: equal first n hashes mean equal chunks, tenant and salt."""
    view = memoryview(data)
    name = tenant.encode("utf-8", "surrogatepass")
    parent = blake2b(
        b"%d " % len(name) + name + salt.encode("utf-8", "surrogatepass"), digest_size=8, person=b"tw chunk"
    ).digest()
    hashes = []
    for start in range(0, min(len(view) // chunk_bytes, MAX_CHUNKS) * chunk_bytes, chunk_bytes):
        digest = blake2b(parent, digest_size=8)
        digest.update(view[start : start + chunk_bytes])
        parent = digest.digest()
        hashes.append(int.from_bytes(parent, "little"))
    return tuple(hashes)
