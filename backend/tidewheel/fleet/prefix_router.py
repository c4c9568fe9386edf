"""The router that knows sessions and caches: the least cost within a bound of load."""

from __future__ import annotations

import math
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
        self._ring = HashRing()
        self._homes: dict[str, T] = {}  # session → its last replica, least recently used first
        self._unstarted: dict[int, set[int]] = {}  # slot → stamps of flights whose prompts are not computed yet

    def join(self, replica: T) -> None:
        if replica in self.loads:
            return
        slot = self.loads.join(replica)
        self.knowledge.join(slot)
        self._unstarted[slot] = set()
        self._ring.join(replica, slot)

    def leave(self, replica: T) -> None:
        if replica not in self.loads:
            return
        slot = self.loads.leave(replica)
        self.knowledge.leave(slot)
        del self._unstarted[slot]
        self._ring.leave(slot)

    # --- decisions --------------------------------------------------------------------------------------------

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:
        if len(self.loads) == 0:
            return None
        num_open = self.loads.open_without(excluded)
        if request.priority == Priority.CRITICAL:
            slot = self._earliest(request, num_open)
        else:
            slot = self._bounded(request, num_open)
        return self.loads.names[slot] if math.isfinite(num_open[slot]) else None

    def _bounded(self, request: RouteRequest, num_open: Float64Array) -> int:
        """Return the slot of a request that keeps to the bound, by its session or its cost."""
        num_replicas, total = len(self.loads), self.loads.total_open
        if num_open is not self.loads.num_open:
            present = num_open[np.isfinite(num_open)]
            num_replicas, total = max(len(present), 1), float(present.sum())
        bound = load_bound(total, num_replicas)
        if request.session:
            key = session_key(request)
            slot = self.loads.slots.get(self._homes[key]) if key in self._homes else None
            if slot is None:
                slot = self._first(key, request, num_open, load_bound(total, num_replicas, NEW_FACTOR))
            # The mean may be low for a moment only: many requests end in one step, and their users ask again at once.
            usual = max(total, self.loads.usual_open * num_replicas / len(self.loads))
            if slot is not None and num_open[slot] < load_bound(usual, num_replicas):
                return slot
        return self._cheapest(request, num_open, bound)

    def _first(self, key: str, request: RouteRequest, num_open: Float64Array, bound: int) -> int | None:
        """Return the slot of a new session by the ring. None: none has room.

        The ring passes replicas with a longer queue than others, as a cold one has that all are sent to.
        """
        loads = self.loads
        waiting, total = loads.waiting_ahead(request.priority), loads.total_waiting[request.priority - 1]
        most = max(LOAD_FACTOR * float(total) / len(loads), request.num_tokens)
        return self._ring.first(key, lambda slots: (num_open[slots] < bound) & (waiting[slots] <= most))

    def _cheapest(self, request: RouteRequest, num_open: Float64Array, bound: int) -> int:
        """Return the slot of the least cost within the bound. The least of all is nearly always within it."""
        cost = RUNNING_WEIGHT * self.loads.running
        cost += self.loads.waiting_ahead(request.priority)
        cost -= self._saved(request)
        slot = int(cost.argmin())
        if num_open[slot] < bound:
            return slot
        return int(np.where(num_open < bound, cost, np.inf).argmin())

    def _earliest(self, request: RouteRequest, num_open: Float64Array) -> int:
        """Return the slot with the fewest prompt tokens before its first token, then with the least to do."""
        loads = self.loads
        ahead = loads.waiting_ahead(request.priority) - self._saved(request)
        if num_open is not loads.num_open:
            ahead[np.isinf(num_open)] = np.inf
        slots = (ahead == ahead[ahead.argmin()]).nonzero()[0]
        to_do = loads.waiting_ahead(Priority.LOW)[slots] + loads.running[slots]
        return int(slots[to_do.argmin()])

    def _saved(self, request: RouteRequest) -> Float64Array | float:
        """Return the prompt tokens, by slot, that need not be computed. One is always computed."""
        depths = self.knowledge.depths(request.chunks, len(self.loads.names))
        if depths is None:
            return 0.0
        tokens = [min(depth * request.chunk_tokens, request.num_tokens - 1.0) for depth in depths.of_level]
        return np.array(tokens).take(depths.levels)

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
