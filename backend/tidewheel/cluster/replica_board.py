"""Board on which Ray's router and the gateway of a process tell each other of replicas and requests.

Ray makes its router by itself, on a thread of its own, and gives it nothing but JSON. So they meet by a name.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tidewheel.fleet.router import ReplicaLoad, RoutedRequest, RouteRequest
from tidewheel.fleet.routers import make_router
from tidewheel.gateway.upstream import Address

REPORT_AGE_S = 5.0  # a report of a replica is not older


class OwnRequests:
    """Requests of this process at one replica: how many are open, and how many were lately."""

    def __init__(self, now: float) -> None:
        self.num_open = 0
        self._since, self._most, self._most_before = now, 0, 0

    def change(self, by: int, now: float) -> None:
        self._turn(now)
        self.num_open += by
        self._most = max(self._most, self.num_open)

    def most(self, now: float) -> int:
        """Return the most that were open at once since a report was made that comes now."""
        self._turn(now)
        return max(self._most, self._most_before)

    def _turn(self, now: float) -> None:
        if (passed := now - self._since) >= REPORT_AGE_S:
            self._most_before = self._most if passed < 2 * REPORT_AGE_S else self.num_open
            self._since, self._most = now, self.num_open


class Ticket:
    """A request that looks for a replica, or has one."""

    def __init__(self, number: int, route: RouteRequest, unfit: Callable[[], Collection[str]]) -> None:
        self.number = number
        self.route = route
        self.unfit = unfit  # authorities of replicas that cannot take it now
        self.flight: RoutedRequest[str] | None = None
        self.counted: OwnRequests | None = None  # where the flight is
        self.num_cached: int | None = None  # of the prompt's tokens, as the replica says at the end


class ReplicaBoard:
    """Owner of the router, whose replicas are named by their gRPC authority. Thread safe."""

    def __init__(self, router: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._router = make_router(router)
        self._clock = clock
        self._own: dict[str, OwnRequests] = {}  # by authority
        self._figures: dict[str, Mapping[str, float]] = {}  # by authority, as reported last
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
                self._leave_fleet(self._addresses[key].grpc)
            for key in found.keys() - self._addresses.keys():
                self._router.join(found[key].grpc)
                self._own[found[key].grpc] = OwnRequests(self._clock())
            self._addresses = found
        self.on_change()

    def drop(self, replica: str) -> None:
        """Forget one that died, before Ray's controller says so."""
        with self._lock:
            address = self._addresses.pop(replica, None)
            if address is not None:
                self._leave_fleet(address.grpc)
        self.on_change()

    def report(self, replica: str, figures: Mapping[str, float]) -> None:
        """Take in what a replica had some time ago. More requests than this process had are those of others."""
        with self._lock:
            if (address := self._addresses.get(replica)) is None:
                return
            self._figures[address.grpc] = figures
            own = self._own[address.grpc]
            num_others = max(int(figures["running"] + figures["waiting"]) - own.most(self._clock()), 0)
            self._router.report(address.grpc, ReplicaLoad(num_requests=own.num_open + num_others))

    def place(self, asked: int | str) -> str | None:
        """Return the id of the replica for a ticket's number, and count it there. None: there is none now.

        The id of a replica is for itself, as long as there is one of that id.
        """
        with self._lock:
            if isinstance(asked, str):
                return asked if asked in self._addresses else None
            ticket = self._tickets.get(asked)
            return None if ticket is None else self._choose(ticket)

    def knows(self, asked: int | str) -> bool:
        """Return whether waiting may help: the request was not given up, or the replica is there."""
        with self._lock:
            return asked in self._tickets or asked in self._addresses

    # --- for the gateway ------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> dict[str, Address]:
        """Return where the replicas listen, by their ids."""
        with self._lock:
            return dict(self._addresses)

    @property
    def figures(self) -> dict[str, Mapping[str, float]]:
        """Return the last report of each replica, by its authority; empty before its first one."""
        with self._lock:
            return {address.grpc: self._figures.get(address.grpc, {}) for address in self._addresses.values()}

    def choose(self, ticket: Ticket) -> str | None:
        """Return the id of the replica for a ticket, and count it there. None: there is none now."""
        with self._lock:
            return self._choose(ticket)

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

    def started(self, flight: RoutedRequest[str]) -> None:
        with self._lock:
            self._router.started(flight)

    def _by_authority(self) -> dict[str, str]:
        return {address.grpc: key for key, address in self._addresses.items()}

    def _choose(self, ticket: Ticket) -> str | None:
        self._leave(ticket)
        authority = self._router.choose(ticket.route, ticket.unfit())
        if authority is None:
            return None
        ticket.flight = self._router.chosen(ticket.route, authority)
        ticket.counted = self._own[authority]
        ticket.counted.change(1, self._clock())
        return self._by_authority()[authority]

    def _leave(self, ticket: Ticket) -> None:
        if ticket.flight is not None:
            assert ticket.counted is not None
            self._router.ended(ticket.flight, ticket.num_cached)
            ticket.counted.change(-1, self._clock())
            ticket.flight = ticket.counted = None

    def _leave_fleet(self, authority: str) -> None:
        self._router.leave(authority)
        del self._own[authority]
        self._figures.pop(authority, None)


_boards: dict[str, ReplicaBoard] = {}
_boards_lock = threading.Lock()


def board_of(deployment: str, router: str) -> ReplicaBoard:
    """Return the board of this process, made by the first that asks."""
    with _boards_lock:
        if deployment not in _boards:
            _boards[deployment] = ReplicaBoard(router)
        return _boards[deployment]
