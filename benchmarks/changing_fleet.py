"""A simulation whose replicas come and go at given times. One that leaves ends what it has."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from peer_routers import LeastBlocks
from tidewheel.fleet.chunk_hashes import chunk_hashes
from tidewheel.fleet.router import Router, RouteRequest
from tidewheel.simulate.outcomes import Outcomes
from tidewheel.simulate.simulator import Replica, Simulator
from tidewheel.workload.traces import Trace


class Change(NamedTuple):
    time: float
    joins: bool  # False: the replica that has been there longest leaves


class ChangingFleet(Simulator):
    def __init__(self, trace: Trace, router: Router[int], changes: Sequence[Change], **others: Any) -> None:
        super().__init__(trace, router=router, **others)
        self._changes = deque(sorted(changes))
        self.joined = dict.fromkeys(range(len(self.replicas)), 0.0)  # replica → time
        self.left: dict[int, float] = {}

    def _arrive(self, turns: list[tuple[float, int]], index: int, now: float) -> None:
        while self._changes and self._changes[0].time <= now:
            self._change(self._changes.popleft())
        super()._arrive(turns, index, now)

    def _change(self, change: Change) -> None:
        if change.joins:
            number = len(self.replicas)
            self.replicas.append(self._make_replica(number))
            self._router.join(number)
            self.joined[number] = change.time
        else:
            number = next(number for number in self.joined if number not in self.left)
            self._router.leave(number)
            self.left[number] = change.time

    def _route_request(self, index: int) -> RouteRequest:
        route = super()._route_request(index)
        if isinstance(self._router, LeastBlocks):
            request = self._request(index, 0.0)
            self._router.cached_tokens = lambda number: self._cached(self.replicas[number], request)
        chunk_tokens = getattr(self._router, "chunk_tokens", 0)
        if not chunk_tokens:
            return route
        data = self._contents.prompt(index).tobytes()
        return route._replace(chunks=chunk_hashes(data, 4 * chunk_tokens), chunk_tokens=chunk_tokens)

    def _cached(self, replica: Replica, request: Any) -> int:
        return int(replica.scheduler._state.kv.prefixes.estimate(request))


def presence(fleet: ChangingFleet, edges: np.ndarray) -> np.ndarray:
    """Return [replicas, windows] True where a replica took requests for the whole window."""
    joined = np.array([fleet.joined[number] for number in range(len(fleet.replicas))])
    left = np.array([fleet.left.get(number, np.inf) for number in range(len(fleet.replicas))])
    return (joined[:, None] <= edges[None, :-1]) & (left[:, None] >= edges[None, 1:])


def open_requests(fleet: ChangingFleet, outcomes: Outcomes, edges: np.ndarray) -> np.ndarray:
    """Return [replicas, windows] the mean number of open requests."""
    result = np.zeros((len(fleet.replicas), len(edges) - 1))
    low, high = edges[:-1], edges[1:]
    for number in range(len(fleet.replicas)):
        own = outcomes.finished & (outcomes.replicas == number)
        start, end = outcomes.trace.arrivals[own, None], outcomes.last_token[own, None]
        result[number] = np.clip(np.minimum(end, high) - np.maximum(start, low), 0, None).sum(axis=0)
    return result / (high - low)
