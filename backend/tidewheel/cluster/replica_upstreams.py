"""Replicas of Ray Serve as the servers behind the gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel.cluster.replica_board import ReplicaBoard
from tidewheel.cluster.reservation import Reservation
from tidewheel.fleet.router import RouteRequest
from tidewheel.gateway.order import Order
from tidewheel.gateway.upstream import Address, Upstream
from tidewheel.gateway.upstreams import Place, Upstreams
from tidewheel_client.request_errors import Busy, RequestError

_RELEASE_S = 2.0  # for slots to be given back at the end


@dataclass(slots=True, kw_only=True)
class ReservedPlace(Place):
    reservation: Reservation


class ReplicaUpstreams(Upstreams):
    """Servers as Ray's router knows them. Each request reserves a slot of its replica for as long as it streams.

    Ray Serve waits for reserved slots before it ends a replica, and would cut streams that it does not know.
    """

    def __init__(self, handle: Any, board: ReplicaBoard, patience_s: float) -> None:
        super().__init__(())
        self._handle = handle
        self._board = board
        self._patience_s = patience_s
        self._known: list[str] = []  # models, as seen last
        self._releases: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ReplicaUpstreams:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._board.on_change = lambda: loop.call_soon_threadsafe(changed.set)
        changed.set()
        self._run(self._follow_board(changed))
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._releases:  # a slot that is not given back would keep its replica
            await asyncio.wait(self._releases, timeout=_RELEASE_S)
        await super().__aexit__(*error)

    @property
    def models(self) -> list[str]:
        """Return those of the last replicas while there is none, because others come."""
        self._known = super().models or self._known
        return self._known

    @property
    def not_ready(self) -> str:
        return super().not_ready if self._members else "no replica has started"

    async def _follow_board(self, changed: asyncio.Event) -> None:
        while True:
            await changed.wait()
            changed.clear()
            addresses = {address.grpc: address for address in self._board.addresses}
            for authority in addresses.keys() - self._members.keys():
                await self._add(addresses[authority], "replica")
            for authority in self._members.keys() - addresses.keys():
                self._remove(authority)

    @contextlib.asynccontextmanager
    async def _held(
        self, order: Order[object], route: RouteRequest, refused: Sequence[Upstream]
    ) -> AsyncIterator[Place]:
        """Choose a replica, and reserve a slot of it meanwhile: `_begin` waits for that.

        Raise `ServerUnavailable` if none can be had within the patience.
        """
        model = order.ask.model
        with self._board.ticket(route, lambda: self._unfit(model, refused)) as ticket:
            chosen = self._board.send(ticket)
            reservation = Reservation(self._handle, ticket.number)
            try:
                address = chosen or await reservation.address(self._patience(order))
                if address is None:
                    raise self._no_server(model)
                assert ticket.flight is not None
                place = ReservedPlace(await self._upstream(address), ticket.flight, reservation=reservation)
                try:
                    yield place
                finally:
                    ticket.num_cached = place.num_cached
            finally:
                self._release(reservation)

    def _patience(self, order: Order[object]) -> float:
        left_ms = order.left_ms
        return self._patience_s if left_ms is None else min(self._patience_s, max(left_ms, 0.0) / 1000)

    async def _upstream(self, address: Address) -> Upstream:
        if address.grpc not in self._members:  # Ray's router heard of it first
            await self._add(address, "replica")
        return self._members[address.grpc].upstream

    def _release(self, reservation: Reservation) -> None:
        """Give the slot back. The answer does not wait for it."""
        task = asyncio.create_task(reservation.release())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _begin(self, place: Place) -> None:
        """Wait for the slot: a replica that goes would cut what has none."""
        assert isinstance(place, ReservedPlace)
        authority = place.upstream.address.grpc
        await place.reservation.wait(lambda: authority in self._members)
        self._board.started(place.flight)

    def _may_move(self, model: str, refused: list[Upstream], error: RequestError) -> bool:
        """Wait for a replica if those that there are were lost; not if all are busy."""
        if super()._may_move(model, refused, error):
            return True
        if isinstance(error, Busy):
            return False
        refused.clear()  # a server that was started again may take it
        return True
