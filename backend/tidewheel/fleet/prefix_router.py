"""The router that knows sessions and caches: the least cost within a bound of load."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tidewheel.batch import Float64Array
from tidewheel.fleet.hash_ring import HashRing
from tidewheel.fleet.loads import LOAD_FACTOR, load_bound
from tidewheel.fleet.plain_routers import CountingRouter, session_key
from tidewheel.fleet.prefix_knowledge import MAX_KNOWN, PrefixKnowledge
from tidewheel.fleet.router import Flight, RouteRequest, T
from tidewheel.request import Priority

NEW_FACTOR = 1.0  # largest load where a new session begins: what is above it is left to sessions at home
RUNNING_WEIGHT = 0.03  # cost of a running token, in prompt tokens to compute: about its share of a step
MAX_SESSIONS = 1 << 17  # whose last replica is remembered


class PrefixAware(CountingRouter[T]):
    """Sessions by where they were last, else by a ring; other requests by cost. All within a bound of load.

    The cost of a replica for a request: prompt tokens that wait there in its class or above, its own that are not
    cached there, and tokens of running requests. A CRITICAL request ignores session and bound: it goes where the
    fewest prompt tokens are computed before its first token.
    """

    def __init__(self, max_known: int = MAX_KNOWN, max_sessions: int = MAX_SESSIONS) -> None:
        super().__init__()
        self.knowledge = PrefixKnowledge(max_known)
        self._max_sessions = max_sessions
        self._ring = HashRing[T]()
        self._homes: dict[str, T] = {}  # session → its last replica, least recently used first
        self._unstarted: dict[int, set[int]] = {}  # slot → stamps of flights whose prompts are not computed yet

    def join(self, replica: T) -> None:
        if replica in self.loads:
            return
        slot = self.loads.join(replica)
        self.knowledge.join(slot)
        self._unstarted[slot] = set()
        self._ring.join(replica)

    def leave(self, replica: T) -> None:
        if replica not in self.loads:
            return
        slot = self.loads.leave(replica)
        self.knowledge.leave(slot)
        del self._unstarted[slot]
        self._ring.leave(replica)

    # --- decisions --------------------------------------------------------------------------------------------

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:
        loads = self.loads
        num_open = loads.open_without(excluded)
        if request.priority == Priority.CRITICAL:
            return self._earliest(request, num_open)
        num_replicas, total = len(loads), loads.total_open
        if excluded:
            present = num_open[np.isfinite(num_open)]
            num_replicas, total = len(present), float(present.sum())
        if not num_replicas:
            return None
        if request.session and (home := self._home(request, num_open, total, num_replicas)) is not None:
            return home
        bound = load_bound(total, num_replicas)
        cost = loads.waiting_ahead(request.priority) + RUNNING_WEIGHT * loads.running
        cost += self._uncached(request)
        cost[num_open >= bound] = np.inf
        return loads.names[int(cost.argmin())]

    def _earliest(self, request: RouteRequest, num_open: Float64Array) -> T | None:
        """Return the replica with the fewest prompt tokens before its first token, then with the least to do."""
        ahead = self.loads.waiting_ahead(request.priority) + self._uncached(request)
        ahead[np.isinf(num_open)] = np.inf
        if not len(ahead):
            return None
        to_do = self.loads.waiting_ahead(Priority.LOW) + self.loads.running
        slot = int(np.where(ahead == ahead.min(), to_do, np.inf).argmin())
        return self.loads.names[slot] if np.isfinite(num_open[slot]) else None

    def _home(self, request: RouteRequest, num_open: Float64Array, total: float, num_replicas: int) -> T | None:
        """Return the last replica of the session if it is within the bound. A new session gets one by the ring.

        None: it is chosen by cost. The ring passes replicas with a queue, as a cold one that all are sent to has.
        """
        slots, key = self.loads.slots, session_key(request)
        slot = slots.get(self._homes[key]) if key in self._homes else None
        if slot is not None:
            return self.loads.names[slot] if num_open[slot] < load_bound(total, num_replicas) else None
        bound, waiting = load_bound(total, num_replicas, NEW_FACTOR), self.loads.waiting_ahead(request.priority)
        most = max(LOAD_FACTOR * float(waiting.sum()) / num_replicas, request.num_tokens)

        def accepts(replica: T) -> bool:
            slot = slots[replica]
            return bool(num_open[slot] < bound and waiting[slot] <= most)

        return self._ring.first(key, accepts)

    def _uncached(self, request: RouteRequest) -> Float64Array | float:
        depths = self.knowledge.depths(request.chunks, len(self.loads.names))
        if depths is None:
            return float(request.num_tokens)
        return np.maximum(request.num_tokens - depths * request.chunk_tokens, 1.0)

    # --- what happens to requests -----------------------------------------------------------------------------

    def chosen(self, request: RouteRequest, replica: T) -> Flight[T]:
        slot = self.loads.slots[replica]
        known = self.knowledge.known(slot, request.chunks)
        num_uncached = max(request.num_tokens - len(known) * request.chunk_tokens, 1)
        flight = self.loads.add(request, replica, num_uncached)
        flight.stamp, flight.known = self.knowledge.touch(slot, request.chunks), known
        self._unstarted[slot].add(flight.stamp)
        if request.session:
            self._remember(session_key(request), replica)
        return flight

    def started(self, flight: Flight[T], num_cached_tokens: int | None = None) -> None:
        if flight.has_started or flight.has_ended:
            return
        super().started(flight)
        if (slot := self.loads.slot_of(flight)) is not None:
            self._unstarted[slot].discard(flight.stamp)
            self._correct(flight, slot, num_cached_tokens)

    def ended(self, flight: Flight[T], num_cached_tokens: int | None = None) -> None:
        slot = None if flight.has_ended else self.loads.slot_of(flight)
        super().ended(flight)
        if slot is None:
            return
        if flight.has_started:
            self._correct(flight, slot, num_cached_tokens)
        else:
            self._unstarted[slot].discard(flight.stamp)
            self.knowledge.forget(slot, flight.request.chunks, flight.stamp)

    def _correct(self, flight: Flight[T], slot: int, num_cached_tokens: int | None) -> None:
        """Forget what the replica's cache must have evicted, if it had less of the prompt than it seemed.

        A chunk less is no sign: blocks and chunks end at different places. Nor is a chunk that another request
        was still computing.
        """
        if num_cached_tokens is None:
            return
        num_found = num_cached_tokens // flight.request.chunk_tokens
        if num_found + 1 >= len(flight.known):
            return
        stamp = flight.known[num_found]
        if stamp not in self._unstarted[slot]:
            self.knowledge.forget_until(slot, stamp)

    def _remember(self, key: str, replica: T) -> None:
        self._homes.pop(key, None)
        self._homes[key] = replica
        if len(self._homes) > self._max_sessions:
            del self._homes[next(iter(self._homes))]
