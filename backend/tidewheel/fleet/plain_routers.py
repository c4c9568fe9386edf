"""Routers that do not know what is in the replicas' caches."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic

import numpy as np

from tidewheel.fleet.hash_ring import HashRing
from tidewheel.fleet.loads import Loads
from tidewheel.fleet.router import Flight, ReplicaLoad, RouteRequest, T


class CountingRouter(Generic[T]):
    """Part of every router: members and loads."""

    def __init__(self) -> None:
        self.loads = Loads[T]()

    def join(self, replica: T) -> None:
        if replica not in self.loads:
            self.loads.join(replica)

    def leave(self, replica: T) -> None:
        if replica in self.loads:
            self.loads.leave(replica)

    def chosen(self, request: RouteRequest, replica: T) -> Flight[T]:
        return self.loads.add(request, replica, request.num_tokens)

    def started(self, flight: Flight[T], num_cached_tokens: int | None = None) -> None:  # noqa: ARG002
        if not flight.has_started and not flight.has_ended:
            self.loads.start(flight)
            flight.has_started = True

    def ended(self, flight: Flight[T], num_cached_tokens: int | None = None) -> None:  # noqa: ARG002
        if not flight.has_ended:
            self.loads.remove(flight)
            flight.has_ended = True

    def report(self, replica: T, load: ReplicaLoad) -> None:
        self.loads.report(replica, load)


class RoundRobin(CountingRouter[T]):
    """Each replica in turn, in the order of joining."""

    def __init__(self) -> None:
        super().__init__()
        self._order: list[T] = []
        self._next = 0

    def join(self, replica: T) -> None:
        super().join(replica)
        self._order = list(self.loads)

    def leave(self, replica: T) -> None:
        super().leave(replica)
        self._order = list(self.loads)

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:  # noqa: ARG002
        turns = (self._order[(self._next + turn) % len(self._order)] for turn in range(len(self._order)))
        return next((replica for replica in turns if replica not in excluded), None)

    def chosen(self, request: RouteRequest, replica: T) -> Flight[T]:
        self._next = (self._order.index(replica) + 1) % len(self._order)
        return super().chosen(request, replica)


class LeastLoaded(CountingRouter[T]):
    """The replica with the fewest open requests."""

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:  # noqa: ARG002
        return least_open(self.loads, excluded)


class SessionAffinity(CountingRouter[T]):
    """One replica for a session, whatever its load; the least loaded for other requests."""

    def __init__(self) -> None:
        super().__init__()
        self._ring = HashRing()

    def join(self, replica: T) -> None:
        if replica not in self.loads:
            self._ring.join(replica, self.loads.join(replica))

    def leave(self, replica: T) -> None:
        if replica in self.loads:
            self._ring.leave(self.loads.leave(replica))

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:
        if not request.session:
            return least_open(self.loads, excluded)
        num_open = self.loads.open_without(excluded)
        slot = self._ring.first(session_key(request), lambda slots: np.isfinite(num_open[slots]))
        return None if slot is None else self.loads.names[slot]


def session_key(request: RouteRequest) -> str:
    """Return the name of its session, apart from those of other tenants."""
    return f"{request.tenant}\0{request.session}"


def least_open(loads: Loads[T], excluded: Collection[T]) -> T | None:
    if not len(loads):
        return None
    num_open = loads.open_without(excluded)
    slot = int(num_open.argmin())
    return loads.names[slot] if np.isfinite(num_open[slot]) else None
