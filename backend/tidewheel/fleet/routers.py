import itertools
import math
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from tidewheel.batch import BoolArray, Float64Array, RowArray
from tidewheel.fleet.router import LOAD_FACTOR, RoutedRequest, Router, RouteRequest, T, load_bound
from tidewheel.fleet.scaling import QUEUE_LIMITS_S
from tidewheel.request import Priority

VIRTUAL_NODES = 64  # points per replica
NEW_FACTOR = 1.0  # load bound of new sessions; old ones may reach LOAD_FACTOR
RUNNING_WEIGHT = 0.03  # cost of a running token, in prompt tokens: about its share of a step
MAX_SESSIONS = 1 << 17
MAX_KNOWN = 1 << 20  # chunks of all replicas
MAX_KNOWN_OF_ONE = 1 << 14
ROOM = 0.25  # longest wait at a replica with room, as a share of a request's objective
MEMORY = 16  # requests whose waits count
_RING_SEARCH = (64, 1024)  # points searched before the rest
_MAX_STAIRS = 4


class HashRing:
    """Consistent hashing (Karger et al., STOC 1997): a joining or leaving replica moves few keys."""

    def __init__(self) -> None:
        self._hashes = np.zeros(0, dtype=np.uint64)  # sorted
        self._slots = np.zeros(0, dtype=np.intp)  # by point

    def join(self, replica: Hashable, slot: int) -> None:
        points = np.sort(np.array([_hash(f"replica {replica} point {n}") for n in range(VIRTUAL_NODES)], np.uint64))
        places = self._hashes.searchsorted(points)
        self._hashes = np.insert(self._hashes, places, points)
        self._slots = np.insert(self._slots, places, slot)

    def leave(self, slot: int) -> None:
        stays = self._slots != slot
        self._hashes, self._slots = self._hashes[stays], self._slots[stays]

    def first(self, key: str, accepts: Callable[[RowArray], BoolArray]) -> int | None:
        """Return the first accepted slot clockwise from the key."""
        slots = self._slots
        begin = int(self._hashes.searchsorted(np.uint64(_hash(key))))
        near, far = (begin + length for length in _RING_SEARCH)
        for part in (slots[begin:near], slots[near:far], slots[far:], slots[:begin]):
            if len(part):
                accepted = accepts(part)
                place = int(accepted.argmax())
                if accepted[place]:
                    return int(part[place])
        return None


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


class RoundRobinRouter(Router[T]):
    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:  # noqa: ARG002
        return next((replica for replica in self.slots if replica not in excluded), None)

    def chosen(self, request: RouteRequest, replica: T) -> RoutedRequest[T]:
        self.slots[replica] = self.slots.pop(replica)  # after all others
        return super().chosen(request, replica)


class SessionAffinityRouter(Router[T]):
    """Router that keeps a session on one replica, whatever its load; other requests go to the least loaded."""

    def __init__(self) -> None:
        super().__init__()
        self._ring = HashRing()

    def _add(self, replica: T, slot: int) -> None:
        self._ring.join(replica, slot)

    def _remove(self, slot: int) -> None:
        self._ring.leave(slot)

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:
        if not request.session:
            return super().choose(request, excluded)
        num_open = self.open_without(excluded)
        slot = self._ring.first(request.session, lambda slots: np.isfinite(num_open[slots]))
        return None if slot is None else self.names[slot]


class PrefixIndex:
    """Index of the prompt chunks that each replica has cached, least recently used first.

    A chunk is a hash of `chunk_hashes`, a slot a replica's index in `Router`.
    """

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._holders: dict[int, int] = {}  # chunk → bits of slots
        self._stamps: dict[int, dict[int, int]] = {}  # slot → chunk → time of last use
        self._now = 0

    def __len__(self) -> int:
        return sum(map(len, self._stamps.values()))

    def join(self, slot: int) -> None:
        self._stamps[slot] = {}
        for other in self._stamps:
            self._trim(other)

    def leave(self, slot: int) -> None:
        for chunk in list(self._stamps[slot]):
            self._drop(slot, chunk)
        del self._stamps[slot]

    def known(self, slot: int, chunks: Sequence[int]) -> tuple[int, ...]:
        """Return the last-use stamp of each leading chunk that the replica has cached."""
        stamps = self._stamps[slot]
        return tuple(itertools.takewhile(bool, (stamps.get(chunk, 0) for chunk in chunks)))

    def depths(self, chunks: Sequence[int], num_slots: int) -> Float64Array | None:
        """Return each replica's number of leading cached chunks, of the `_MAX_STAIRS` largest; None if all are 0."""
        stairs = self._stairs(chunks)[-_MAX_STAIRS:]
        if not stairs:
            return None
        num_bytes = (num_slots + 7) // 8
        raw = np.frombuffer(b"".join(slots.to_bytes(num_bytes, "little") for _, slots in stairs), dtype=np.uint8)
        bits = np.unpackbits(raw.reshape(len(stairs), num_bytes), axis=1, count=num_slots, bitorder="little")
        levels = bits[0]
        for higher in bits[1:]:  # a slot of one stair is on all earlier ones
            levels += higher
        depths: Float64Array = np.array([0.0, *(depth for depth, _ in stairs)]).take(levels)
        return depths

    def _stairs(self, chunks: Sequence[int]) -> list[tuple[int, int]]:
        """Return pairs (n, bit set of the slots with at least n leading chunks), n ascending."""
        stairs: list[tuple[int, int]] = []
        slots, holders = -1, self._holders
        for depth, chunk in enumerate(chunks):
            left = slots & holders.get(chunk, 0)
            if left != slots and depth:
                stairs.append((depth, slots))
            slots = left
            if not slots:
                return stairs
        return [*stairs, (len(chunks), slots)] if chunks else stairs

    def touch(self, slot: int, chunks: Sequence[int]) -> int:
        """Record the use of chunks by a replica, and return the stamp of this use."""
        self._now += 1
        stamps, holders, bit = self._stamps[slot], self._holders, 1 << slot
        for chunk in reversed(chunks):  # the first chunk, which most prompts share, is forgotten last
            if stamps.pop(chunk, None) is None:
                holders[chunk] = holders.get(chunk, 0) | bit
            stamps[chunk] = self._now
        self._trim(slot)
        return self._now

    def forget(self, slot: int, chunks: Sequence[int], stamp: int) -> None:
        """Remove chunks of a replica, unless used after `stamp`."""
        stamps = self._stamps[slot]
        for chunk in chunks:
            if stamps.get(chunk) == stamp:
                self._drop(slot, chunk)

    def forget_until(self, slot: int, stamp: int) -> None:
        """Remove all chunks last used up to the stamp, as an LRU cache evicts the oldest first."""
        stamps = self._stamps[slot]
        while stamps and next(iter(stamps.values())) <= stamp:
            self._drop(slot, next(iter(stamps)))

    def _trim(self, slot: int) -> None:
        limit = min(MAX_KNOWN_OF_ONE, self._max_known // len(self._stamps))
        stamps = self._stamps[slot]
        while len(stamps) > limit:
            self._drop(slot, next(iter(stamps)))

    def _drop(self, slot: int, chunk: int) -> None:
        del self._stamps[slot][chunk]
        if left := self._holders[chunk] & ~(1 << slot):
            self._holders[chunk] = left
        else:
            del self._holders[chunk]


class PrefixAwareRouter(SessionAffinityRouter[T]):
    """Router by session, cached prefix and load, all within a load bound.

    A session stays at its last replica; a new one goes by the hash ring. Other requests go to the replica of least
    cost: prompt tokens waiting in their class or above, their uncached prompt tokens, and running tokens. CRITICAL
    ones go where the fewest prompt tokens precede their first token.
    """

    def __init__(self, max_known: int = MAX_KNOWN, max_sessions: int = MAX_SESSIONS) -> None:
        super().__init__()
        self.prefixes = PrefixIndex(max_known)
        self._max_sessions = max_sessions
        self._homes: dict[str, T] = {}  # session → last replica, in LRU order
        self._unstarted: dict[int, dict[int, RoutedRequest[T]]] = {}  # slot → stamp → request with uncomputed prompt

    def _add(self, replica: T, slot: int) -> None:
        super()._add(replica, slot)
        self.prefixes.join(slot)
        self._unstarted[slot] = {}

    def _remove(self, slot: int) -> None:
        super()._remove(slot)
        self.prefixes.leave(slot)
        del self._unstarted[slot]

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:
        if not self.slots:
            return None
        num_open = self.open_without(excluded)
        if request.priority == Priority.CRITICAL:
            slot = self._earliest(request, num_open)
        else:
            slot = self._bounded(request, num_open)
        return self.names[slot] if math.isfinite(num_open[slot]) else None

    def _bounded(self, request: RouteRequest, num_open: Float64Array) -> int:
        num_replicas, total = len(self.slots), self.total_open
        if num_open is not self.num_open:
            present = num_open[np.isfinite(num_open)]
            num_replicas, total = max(len(present), 1), float(present.sum())
        bound = load_bound(total, num_replicas)
        if request.session:
            key = request.session
            slot = self.slots.get(self._homes[key]) if key in self._homes else None
            if slot is None:
                slot = self._first(key, request, num_open, load_bound(total, num_replicas, NEW_FACTOR))
            # The mean dips when many requests end in one step, and their users ask again at once.
            usual = max(total, self.usual_open * num_replicas / len(self.slots))
            if slot is not None and num_open[slot] < load_bound(usual, num_replicas):
                return slot
        return self._cheapest(request, num_open, bound)

    def _first(self, key: str, request: RouteRequest, num_open: Float64Array, bound: int) -> int | None:
        """Return a new session's slot: the first on the ring with room and no unusually long queue, or None."""
        waiting, total = self.waiting[request.priority - 1], self.total_waiting[request.priority - 1]
        most = max(LOAD_FACTOR * float(total) / len(self.slots), request.num_tokens)
        return self._ring.first(key, lambda slots: (num_open[slots] < bound) & (waiting[slots] <= most))

    def _cheapest(self, request: RouteRequest, num_open: Float64Array, bound: int) -> int:
        cost = RUNNING_WEIGHT * self.running
        cost += self.waiting[request.priority - 1]
        cost -= self._cached_tokens(request)
        slot = int(cost.argmin())
        return slot if num_open[slot] < bound else int(np.where(num_open < bound, cost, np.inf).argmin())

    def _earliest(self, request: RouteRequest, num_open: Float64Array) -> int:
        ahead = self.waiting[request.priority - 1] - self._cached_tokens(request)
        if num_open is not self.num_open:
            ahead[np.isinf(num_open)] = np.inf
        slots = (ahead == ahead[ahead.argmin()]).nonzero()[0]
        to_do = self.waiting[-1, slots] + self.running[slots]
        return int(slots[to_do.argmin()])

    def _cached_tokens(self, request: RouteRequest) -> Float64Array | float:
        """Return cached prompt tokens by slot; the last token never counts."""
        depths = self.prefixes.depths(request.chunks, len(self.names))
        return 0.0 if depths is None else np.minimum(depths * request.chunk_tokens, request.num_tokens - 1.0)

    def chosen(self, request: RouteRequest, replica: T) -> RoutedRequest[T]:
        slot = self.slots[replica]
        known = self.prefixes.known(slot, request.chunks)
        num_uncached = max(request.num_tokens - len(known) * request.chunk_tokens, 1)
        routed = self.count(request, replica, num_uncached)
        routed.stamp, routed.known = self.prefixes.touch(slot, request.chunks), known
        self._unstarted[slot][routed.stamp] = routed
        if request.session:
            self._homes.pop(request.session, None)
            self._homes[request.session] = replica
            if len(self._homes) > self._max_sessions:
                del self._homes[next(iter(self._homes))]
        return routed

    def _learn(self, routed: RoutedRequest[T], slot: int, num_cached_tokens: int | None) -> None:
        """Forget the chunks of an unstarted request, and chunks that the replica has evicted.

        It has evicted some if two fewer (one may be rounding) are cached than indexed, and no request computes them.
        """
        self._unstarted[slot].pop(routed.stamp, None)
        if not routed.has_started:
            self.prefixes.forget(slot, routed.request.chunks, routed.stamp)
        if not routed.has_started or num_cached_tokens is None:
            return
        num_found = num_cached_tokens // routed.request.chunk_tokens
        if num_found + 1 >= len(routed.known):
            return
        stamp = routed.known[num_found]
        if stamp not in self._unstarted[slot]:
            self.prefixes.forget_until(slot, stamp)


class ReplicaTerms(NamedTuple):
    cost: int = 0
    round_trip_s: float = 0.0  # measured time of a message there and back


class TieredRouter(PrefixAwareRouter[T]):
    """Prefix-aware router among the replicas of the cheapest tier that has room. A tier has one cost.

    A replica has room while the expected wait is at most `ROOM` of the request's objective: its class's limit, the
    time to its deadline, or that to the first token that it asks for, which counts where a replica can meet it. Wait
    and round trip together must meet the objective. A conversation stays in the tier that has its cache while the
    objective is met there, and returns to a cheaper one where nothing waits. Without room anywhere, the tier of the
    shortest delay is chosen; if none is in time, and for LOW requests, the cheapest.
    """

    def __init__(self, terms: Callable[[T], ReplicaTerms], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._terms = terms
        self._clock = clock
        self._waits: dict[int, tuple[float, float]] = {}  # slot → averages of waits (s), and of requests that waited

    def _add(self, replica: T, slot: int) -> None:
        super()._add(replica, slot)
        self._waits[slot] = 0.0, 1.0

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:
        present = {replica: self._terms(replica).cost for replica in self.slots if replica not in excluded}
        costs = {one: cost for one, cost in present.items() if self._may_take(request, one, cost)}
        if not costs:
            return None
        chosen = min(costs.values()) if request.priority == Priority.LOW else self._tier(request, costs)
        return super().choose(request, [replica for replica in self.slots if costs.get(replica) != chosen])

    def _may_take(self, request: RouteRequest, replica: T, cost: int) -> bool:
        """Return whether the replica may take what a cheaper one has refused: in time, and not LOW."""
        if cost <= request.busy_cost:
            return True
        return request.priority != Priority.LOW and self._delay_s(request, replica) <= self._objective_s(request)

    def _tier(self, request: RouteRequest, costs: Mapping[T, int]) -> int:
        objective_s, home = self._objective_s(request), self._home_cost(request, costs)
        delays = {replica: self._delay_s(request, replica) for replica in costs}
        if min(delays.values()) <= (own_s := request.first_token_due - self._clock()):
            objective_s = min(objective_s, own_s)
        in_time = [replica for replica in costs if delays[replica] <= objective_s]
        if not in_time:
            return min(costs.values())
        with_room = [
            costs[replica]
            for replica in in_time
            if delays[replica] - self._terms(replica).round_trip_s <= objective_s * _share(costs[replica], home)
        ]
        return min(with_room) if with_room else costs[min(in_time, key=delays.__getitem__)]

    def _home_cost(self, request: RouteRequest, costs: Mapping[T, int]) -> int | None:
        """Return the cost of the replica that has the session, or else at least half of the prompt, in its cache."""
        if (home := self._homes.get(request.session)) is not None and home in costs:
            return costs[home]
        depths = {one: len(self.prefixes.known(self.slots[one], request.chunks)) for one in costs}
        deepest = max(costs, key=lambda one: (depths[one], -costs[one]))
        is_home = depths[deepest] and 2 * depths[deepest] * request.chunk_tokens >= request.num_tokens
        return costs[deepest] if is_home else None

    def _objective_s(self, request: RouteRequest) -> float:
        return min(QUEUE_LIMITS_S[request.priority], request.due - self._clock())

    def _delay_s(self, request: RouteRequest, replica: T) -> float:
        """Return the round trip and the expected wait: others' for each request ahead, or the oldest one's so far."""
        slot, round_trip_s = self.slots[replica], self._terms(replica).round_trip_s
        ahead, (waited_s, num_waited) = self._ahead(request.priority, slot), self._waits[slot]
        so_far = max((self._clock() - one.sent for one in ahead if one.request.tells_start), default=0.0)
        return max(len(ahead) * waited_s / num_waited + round_trip_s, so_far)

    def _ahead(self, priority: Priority, slot: int) -> list[RoutedRequest[T]]:
        return [one for one in self._unstarted[slot].values() if one.request.priority <= priority]

    def chosen(self, request: RouteRequest, replica: T) -> RoutedRequest[T]:
        num_ahead, routed = len(self._ahead(request.priority, self.slots[replica])), super().chosen(request, replica)
        routed.sent, routed.num_ahead = self._clock(), num_ahead
        return routed

    def _learn(self, routed: RoutedRequest[T], slot: int, num_cached_tokens: int | None) -> None:
        is_start = routed.has_started and routed.stamp in self._unstarted[slot]
        super()._learn(routed, slot, num_cached_tokens)
        waited_s = routed.waited_s
        if waited_s is None and routed.request.tells_start:
            waited_s = self._clock() - routed.sent - self._terms(routed.replica).round_trip_s
        if is_start and waited_s is not None and routed.request.priority != Priority.LOW:
            mean_s, mean_num = self._waits[slot]
            mean_s += (max(waited_s, 0.0) - mean_s) / MEMORY
            self._waits[slot] = mean_s, mean_num + (routed.num_ahead + 1 - mean_num) / MEMORY


def _share(cost: int, home: int | None) -> float:
    """Return the share of the objective that a conversation may wait at a replica; `home`: cost of its last one."""
    if home is None or cost > home:
        return ROOM
    return 1.0 if cost == home else 0.0


ROUTERS: Mapping[str, Callable[[], Router[Any]]] = {
    "round-robin": RoundRobinRouter,
    "least-loaded": Router,
    "session-affinity": SessionAffinityRouter,
    "prefix-aware": PrefixAwareRouter,
}
