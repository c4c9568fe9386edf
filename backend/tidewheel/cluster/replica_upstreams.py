"""Replicas of Ray Serve as the servers behind the gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidewheel.cluster.replica_board import ReplicaBoard, Ticket
from tidewheel.cluster.reservation import Reservation
from tidewheel.cluster.slots import Slot, Slots
from tidewheel.gateway.upstream import Upstream
from tidewheel.gateway.upstream_request import Attempt, UpstreamRequest
from tidewheel.gateway.upstreams import UpstreamLease, Upstreams
from tidewheel_client.errors import Busy, RequestError, ServerUnavailable

MAX_HELD = 1024  # requests that wait for a replica


@dataclass(slots=True, kw_only=True)
class ReservedLease(UpstreamLease):
    slot: Slot


class ReplicaUpstreams(Upstreams):
    """Servers as Ray's router knows them. A slot of a replica is reserved for as long as it has requests.

    Ray Serve waits for reserved slots before it ends a replica, and would cut streams that it does not know.
    """

    def __init__(self, handle: Any, board: ReplicaBoard, patience_s: float, *, may_be_empty: bool = False) -> None:
        """`may_be_empty`: that there is no replica is nothing wrong. One is started for requests that wait."""
        super().__init__(())
        self._may_be_empty = may_be_empty
        self._num_held = 0
        self._handle = handle
        self._board = board
        self._patience_s = patience_s
        self._known: list[str] = []  # models, as seen before replicas went
        self._slots = Slots(partial(Reservation, handle))

    async def __aenter__(self) -> ReplicaUpstreams:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._board.on_change = lambda: loop.call_soon_threadsafe(changed.set)
        changed.set()
        self._run(self._follow_board(changed))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._slots.close()
        await super().__aexit__(*error)

    @property
    def models(self) -> list[str]:
        """Return those of the last replicas while there is none, because others come."""
        return super().models or self._known

    @property
    def not_ready(self) -> str:
        if self._members:
            return super().not_ready
        return "" if self._may_be_empty else "no replica has started"

    def model(self, name: str) -> str:
        """See `Upstreams.model`. While no models are known, any name may be right: replicas come and go."""
        return name if name and not self.models else super().model(name)

    async def _follow_board(self, changed: asyncio.Event) -> None:
        while True:
            await changed.wait()
            changed.clear()
            replicas = self._board.addresses
            self._slots.keep_only(replicas)
            addresses = {address.grpc: address for address in replicas.values()}
            for authority in addresses.keys() - self._members.keys():
                await self._add(addresses[authority], "replica")
            self._known = self.models
            for authority in self._members.keys() - addresses.keys():
                self._remove(authority)

    @contextlib.asynccontextmanager
    async def _lease(self, attempt: Attempt[Any]) -> AsyncIterator[UpstreamLease]:
        """Choose a replica, and reserve a slot of it meanwhile: `_begin` waits for that.

        Raise `ServerUnavailable` if none can be had within the patience.
        """
        with self._board.ticket(attempt.route, lambda: self._unfit(attempt)) as ticket:
            replica = self._board.choose(ticket) or await self._wait(ticket, attempt)
            slot = self._slots.take(replica)
            try:
                assert ticket.flight is not None
                upstream = await self._upstream(replica, ticket.flight.replica)
                lease = ReservedLease(upstream, ticket.flight, slot=slot)
                try:
                    yield lease
                finally:
                    ticket.num_cached = lease.num_cached
            finally:
                self._slots.give_back(slot)

    async def _wait(self, ticket: Ticket, attempt: Attempt[Any]) -> str:
        """Return the id of the replica when there is one. Ray counts what waits, for the policy of scaling."""
        if self._num_held >= MAX_HELD:
            raise Busy(f"no replica is ready, and {MAX_HELD} requests wait for one already")
        reservation = Reservation(self._handle, ticket.number)
        self._num_held += 1
        try:
            replica = await reservation.replica(self._patience(attempt.request))
        finally:
            self._num_held -= 1
            self._slots.release(reservation)
        if replica is None:
            raise self._no_server(attempt)
        return replica

    def _patience(self, request: UpstreamRequest) -> float:
        left_ms = request.left_ms
        return self._patience_s if left_ms is None else min(self._patience_s, max(left_ms, 0.0) / 1000)

    async def _upstream(self, replica: str, authority: str) -> Upstream:
        """Raise `ServerUnavailable` if the replica has gone."""
        if authority not in self._members:  # Ray's router heard of it first
            address = self._board.addresses.get(replica)
            if address is None:
                raise ServerUnavailable("its replica went as it was asked")
            await self._add(address, "replica")
        return self._members[authority].upstream

    async def _begin(self, lease: UpstreamLease) -> None:
        """Wait for the slot: a replica that goes would cut what has none."""
        assert isinstance(lease, ReservedLease)
        authority = lease.upstream.address.grpc
        await lease.slot.reserved.wait(lambda: authority in self._members)
        self._board.started(lease.routed)

    def _may_retry(self, attempt: Attempt[Any], error: RequestError) -> bool:
        """Wait for a replica if those that there are were lost; not if all are busy."""
        if super()._may_retry(attempt, error):
            return True
        if isinstance(error, Busy):
            return False
        attempt.refused.clear()  # a server that was started again may take it
        return True
