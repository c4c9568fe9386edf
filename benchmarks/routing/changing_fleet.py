"""A simulation whose replicas come and go at given times. One that leaves ends what it has."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from routing.peer_routers import LeastBlocks
from tidewheel.fleet.router import Router, RouteRequest, chunk_hashes
from tidewheel.request import Request
from tidewheel.simulate.outcomes import SimulationOutcomes
from tidewheel.simulate.simulator import EngineReplica, Simulator
from tidewheel.simulate.trace_requests import TraceRequests
from tidewheel.workload.traces import Trace


class Change(NamedTuple):
    time: float
    joins: bool  # False: the replica that has been there longest leaves


class ChangingFleet(Simulator):
    def __init__(self, trace: Trace, router: Router[int], changes: Sequence[Change], **others: Any) -> None:
        super().__init__(trace, router=router, **others)
        fine = FineRequests(
            trace,
            max_model_len=others["max_model_len"],
            session_ttl_s=others["session_ttl_s"],
            max_tokens=None,
            has_contents=True,
        )
        fine.chunk_tokens = getattr(router, "chunk_tokens", 0)
        self._requests = fine
        self._changes = deque(sorted(changes))
        self.joined = dict.fromkeys(range(len(self.replicas)), 0.0)  # replica → time
        self.left: dict[int, float] = {}
        self.most_cached = np.zeros(len(trace), np.int64)  # tokens of a session's request, on any replica
        self.cached_where_sent = np.zeros(len(trace), np.int64)

    def _arrive(self, index: int, now: float) -> None:
        while self._changes and self._changes[0].time <= now:
            self._change(self._changes.popleft(), now)
        super()._arrive(index, now)

    def _change(self, change: Change, now: float) -> None:
        fleet = self.fleet
        if change.joins:
            number = fleet._add(now)
            fleet._join(number)
            self.joined[number] = now
            return
        number = next(number for number in self.joined if number not in self.left)
        del fleet._ready[number]
        fleet._draining.add(number)
        fleet._go_if_empty(number, now)
        self._router.leave(number)
        self.left[number] = now

    def _send(self, index: int, now: float) -> None:
        request = self._requests.request(index, now)
        if isinstance(self._router, LeastBlocks):
            self._router.cached_tokens = lambda number: self._cached(number, request)
        cached = {number: self._cached(number, request) for number in self.fleet._ready if request.session_id}
        super()._send(index, now)
        if cached:
            self.most_cached[index] = max(cached.values())
            self.cached_where_sent[index] = cached[self._routed[index].replica]

    def _cached(self, number: int, request: Request) -> int:
        replica = self.replicas[number]
        assert isinstance(replica, EngineReplica)
        return int(replica.scheduler._state.kv.prefixes.estimate(request))


class FineRequests(TraceRequests):
    """Requests whose chunks are as long as the router wants them."""

    chunk_tokens = 0  # 0: as the simulator makes them

    def route(self, index: int) -> RouteRequest:
        route = super().route(index)
        if not self.chunk_tokens:
            return route
        chunks = chunk_hashes(self.contents.prompt(index).tobytes(), 4 * self.chunk_tokens, self.trace.tenant(index))
        return route._replace(chunks=chunks, chunk_tokens=self.chunk_tokens)


def presence(fleet: ChangingFleet, edges: np.ndarray) -> np.ndarray:
    """Return [replicas, windows] True where a replica took requests for the whole window."""
    joined = np.array([fleet.joined[number] for number in range(len(fleet.replicas))])
    left = np.array([fleet.left.get(number, np.inf) for number in range(len(fleet.replicas))])
    return (joined[:, None] <= edges[None, :-1]) & (left[:, None] >= edges[None, 1:])


def open_requests(fleet: ChangingFleet, outcomes: SimulationOutcomes, edges: np.ndarray) -> np.ndarray:
    """Return [replicas, windows] the mean number of open requests."""
    result = np.zeros((len(fleet.replicas), len(edges) - 1))
    low, high = edges[:-1], edges[1:]
    for number in range(len(fleet.replicas)):
        own = outcomes.finished & (outcomes.replicas == number)
        start, end = outcomes.trace.arrivals[own, None], outcomes.last_token[own, None]
        result[number] = np.clip(np.minimum(end, high) - np.maximum(start, low), 0, None).sum(axis=0)
    return result / (high - low)
