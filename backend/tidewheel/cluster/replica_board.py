"""Board on which Ray's router and the gateway of a process tell each other of replicas and requests.

Ray makes its router by itself, on a thread of its own, and gives it nothing but JSON. So they meet by a name.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tidewheel.fleet.named_routers import make_router
from tidewheel.fleet.router import Flight, ReplicaLoad, RouteRequest
from tidewheel.gateway.upstream import Address


class Ticket:
    """A request that looks for a replica, or has one."""

    def __init__(self, number: int, route: RouteRequest, unfit: Callable[[], Collection[str]]) -> None:
        self.number = number
        self.route = route
        self.unfit = unfit  # authorities of replicas that cannot take it now
        self.flight: Flight[str] | None = None
        self.is_sent = False  # to the replica of its flight, which is its only one
        self.num_cached: int | None = None  # of the prompt's tokens, as the replica says at the end


class ReplicaBoard:
    """Owner of the router, whose replicas are named by their gRPC authority. Thread safe."""

    def __init__(self, router: str) -> None:
        self._router = make_router(router)
        self._lock = threading.Lock()
        self._addresses: dict[str, Address] = {}  # by replica id
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count()
        self.on_change: Callable[[], object] = lambda: None

    # --- for Ray's router -----------------------------------------------------------------------------------------

    def update(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in the replicas that there are, by their ids."""
        with self._lock:
            found = {key: Address(**one) for key, one in metadata.items() if one}
            for key in self._addresses.keys() - found.keys():
                self._router.leave(self._addresses[key].grpc)
            for key in found.keys() - self._addresses.keys():
                self._router.join(found[key].grpc)
            self._addresses = found
        self.on_change()

    def drop(self, replica: str) -> None:
        """Forget one that died, before Ray's controller says so."""
        with self._lock:
            address = self._addresses.pop(replica, None)
            if address is not None:
                self._router.leave(address.grpc)
        self.on_change()

    def report(self, replica: str, load: ReplicaLoad) -> None:
        with self._lock:
            if (address := self._addresses.get(replica)) is not None:
                self._router.report(address.grpc, load)

    def place(self, number: int) -> str | None:
        """Return the id of the replica for a ticket, and count it there. None: there is none now."""
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is None:
                return None  # its request was given up
            if not ticket.is_sent:
                self._choose(ticket)
            return None if ticket.flight is None else self._by_authority().get(ticket.flight.replica)

    def knows(self, number: int) -> bool:
        """Return whether the request of a ticket was not given up."""
        with self._lock:
            return number in self._tickets

    # --- for the gateway ------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[Address]:
        with self._lock:
            return list(self._addresses.values())

    def send(self, ticket: Ticket) -> Address | None:
        """Choose the replica for good, before Ray asks. None: there is none now, and Ray will ask."""
        with self._lock:
            self._choose(ticket)
            if ticket.flight is None:
                return None
            ticket.is_sent = True
            return self._addresses[self._by_authority()[ticket.flight.replica]]

    @contextlib.contextmanager
    def ticket(self, route: RouteRequest, unfit: Callable[[], Collection[str]]) -> Iterator[Ticket]:
        with self._lock:
            ticket = Ticket(next(self._numbers), route, unfit)
            self._tickets[ticket.number] = ticket
        try:
            yield ticket
        finally:
            with self._lock:
                del self._tickets[ticket.number]
                self._leave(ticket)

    def started(self, flight: Flight[str]) -> None:
        with self._lock:
            self._router.started(flight)

    def _by_authority(self) -> dict[str, str]:
        return {address.grpc: key for key, address in self._addresses.items()}

    def _choose(self, ticket: Ticket) -> None:
        self._leave(ticket)
        authority = self._router.choose(ticket.route, ticket.unfit())
        if authority is not None:
            ticket.flight = self._router.chosen(ticket.route, authority)

    def _leave(self, ticket: Ticket) -> None:
        if ticket.flight is not None:
            self._router.ended(ticket.flight, ticket.num_cached)
            ticket.flight = None


_boards: dict[str, ReplicaBoard] = {}
_boards_lock = threading.Lock()


def board_of(deployment: str, router: str) -> ReplicaBoard:
    """Return the board of this process, made by the first that asks."""
    with _boards_lock:
        if deployment not in _boards:
            _boards[deployment] = ReplicaBoard(router)
        return _boards[deployment]
