"""The requests that wait for a row, in the order of a policy."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from typing import NamedTuple

from tidewheel.kvcache.invariants import require
from tidewheel.request import Priority, Request
from tidewheel.scheduler.fairness import VirtualCounters
from tidewheel.scheduler.policy import Policy, Rank, rank_of

MAX_DISPLACED = 16  # waiting requests that one newcomer takes the place of
MAX_LANES = 16  # tenants that are looked at when all requests of the one served next wait for something
WINDOW = 64  # waiting requests whose cached prefixes are compared


class SortedQueue:
    """Requests by a unique key, in a sorted list.

    An insert or a removal is a binary search and one `memmove` of pointers: for thousands of entries that is cheaper
    than a heap with lazy deletion.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries)

    def __reversed__(self) -> Iterator[Request]:
        return (request for _, request in reversed(self._entries))

    def push(self, key: Rank, request: Request) -> None:
        insort(self._entries, (key, request))

    def remove(self, key: Rank, request: Request) -> None:
        index = bisect_left(self._entries, (key,))
        found = self._entries[index][1] if index < len(self._entries) else None
        require(found is request, f"{request} does not wait where it should")
        del self._entries[index]

    def first_from(self, key: Rank) -> Request | None:
        """Return the first request whose key is not smaller."""
        index = bisect_left(self._entries, (key,))
        return self._entries[index][1] if index < len(self._entries) else None


class Lane(NamedTuple):
    """Waiting requests in one order: those of one tenant, or all."""

    new: SortedQueue  # never started
    returning: SortedQueue  # preempted, or forked from a leader that has started

    def queue_of(self, request: Request) -> SortedQueue:
        return self.returning if request.has_begun else self.new


class WaitingSet:
    """Keeps waiting requests in lanes; a policy by tenant has one for each tenant, others have one.

    A group waits as one entry, its leader, and counts as many requests as it has.
    """

    def __init__(self, policy: Policy, counters: VirtualCounters | None = None) -> None:
        """Take the counters that decide between the lanes of a policy by tenant."""
        self._policy = policy
        self._counters = counters
        self._lanes: dict[str, Lane] = {}
        self._ages = SortedQueue()  # new entries of all lanes: by class, then arrival
        self._new_tokens = dict.fromkeys(Priority, 0)  # prompt tokens of new requests, by class
        self._num_new: dict[str, int] = {}  # by tenant; by tenant only
        self._crowds: list[tuple[float, str]] = []  # (new requests over weight, tenant), ascending; by tenant only
        self.num_new = 0  # requests that never started: what admission bounds

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __iter__(self) -> Iterator[Request]:
        """Yield every entry; followers have none."""
        return (request for lane in self._lanes.values() for queue in lane for request in queue)

    @property
    def num_new_tokens(self) -> int:
        return sum(self._new_tokens.values())

    @property
    def lowest_class(self) -> int:
        """The class from which on a newcomer takes no place; over LOW: any newcomer may take one."""
        if self._counters is not None:
            return Priority.LOW + 1
        return next((request.service_class for request in reversed(self._ages)), 0)

    @property
    def oldest_arrival(self) -> float | None:
        """Arrival of the new request that has waited longest."""
        return min((r.arrival_time for p in Priority if (r := self.oldest(p)) is not None), default=None)

    def oldest(self, service_class: Priority) -> Request | None:
        """Return the first arrival among the new requests of a class."""
        request = self._ages.first_from((service_class,))
        return request if request is not None and request.service_class is service_class else None

    def num_tokens_ahead(self, service_class: int) -> int:
        """Count prompt tokens of new requests in this class and better ones."""
        return sum(count for p, count in self._new_tokens.items() if p <= service_class)

    def push(self, request: Request) -> None:
        """Add the request, with its group if it is new."""
        request.rank = rank_of(self._policy, request)
        name = self._lane_of(request)
        if name not in self._lanes:
            self._lanes[name] = Lane(SortedQueue(), SortedQueue())
            if self._counters is not None:
                self._counters.activate(name)
        self._insert(self._lanes[name], request)
        if not request.has_begun:
            self.count(request, 1 + len(request.followers))

    def remove(self, request: Request) -> None:
        """Take the request out, with its group if it is new."""
        name = self._lane_of(request)
        lane = self._lanes[name]
        self._take(lane, request)
        if not request.has_begun:
            self.count(request, -1 - len(request.followers))
        if not lane.new and not lane.returning:
            del self._lanes[name]
            if self._counters is not None:
                self._counters.deactivate(name)

    def count(self, request: Request, change: int) -> None:
        """Change how many new requests the entry of this one stands for."""
        self.num_new += change
        self._new_tokens[request.service_class] += change * request.num_tokens
        if self._counters is None:
            return
        name, weight = request.tenant, self._counters.weight(request.tenant)
        before = self._num_new.pop(name, 0)
        if before:
            del self._crowds[bisect_left(self._crowds, (before / weight, name))]
        if before + change:
            self._num_new[name] = before + change
            insort(self._crowds, ((before + change) / weight, name))

    def reclassify(self, request: Request, service_class: Priority, *, is_overdue: bool = False) -> None:
        """Move the request, and its group, to a class; an overdue one goes by arrival there."""
        lane = self._lanes[self._lane_of(request)]
        self._take(lane, request)
        num_tokens = 0 if request.has_begun else (1 + len(request.followers)) * request.num_tokens
        self._new_tokens[request.service_class] -= num_tokens
        self._new_tokens[service_class] += num_tokens
        request.service_class = service_class
        request.rank = rank_of(self._policy, request, is_overdue=is_overdue)
        self._insert(lane, request)

    def candidates(self, *, with_new: bool) -> Iterator[Request]:
        """Yield entries in the order in which they enter; without `with_new`, only those that return.

        Where tenants take turns, those of the tenant served next go first. The set must not change meanwhile.
        """
        for lane in self._next_lanes(with_new=with_new):
            if with_new and lane.returning:
                yield from heapq.merge(lane.returning, lane.new, key=lambda request: request.rank)
            else:
                yield from lane.new if with_new else lane.returning

    def key(self, request: Request) -> Rank:
        """Make ranks of running and waiting requests comparable at this moment."""
        return request.rank if self._counters is None else (self._counters.counter(request.tenant), *request.rank)

    def displaceable(self, newcomer: Request, count: int, service_class: Priority) -> Iterator[Request]:
        """Yield new entries in the order in which `count` newcomers like this one take their places.

        The lowest class goes first, in it the newest; never one of the newcomer's class or a better one. Where
        tenants take turns, the tenant that has most waiting over its weight gives places, while that is more than
        the newcomer's tenant would have; after that the newcomer's own tenant gives those of lower classes. No more
        than `MAX_DISPLACED` may be taken.
        """
        if self._counters is None:
            yield from _lower(self._ages, service_class)
            return
        tenant, weight = newcomer.tenant, self._counters.weight
        largest = [name for _, name in self._crowds[-MAX_DISPLACED - 1 :] if name != tenant]
        counts = {name: self._num_new[name] for name in largest}
        entries = {name: reversed(self._lanes[name].new) for name in largest}
        lower = _lower(self._lanes[tenant].new, service_class) if tenant in self._lanes else iter(())
        own = self._num_new.get(tenant, 0) + count
        while True:
            share, name = max(((counts[name] / weight(name), name) for name in counts), default=(0.0, ""))
            if share > own / weight(tenant):
                victim = next(entries[name])
                counts[name] -= 1 + len(victim.followers)
            else:
                own_victim = next(lower, None)
                if own_victim is None:
                    return
                victim = own_victim
                own -= 1 + len(victim.followers)
            yield victim

    def _insert(self, lane: Lane, request: Request) -> None:
        lane.queue_of(request).push(request.rank, request)
        if not request.has_begun:
            self._ages.push(_age(request), request)

    def _take(self, lane: Lane, request: Request) -> None:
        lane.queue_of(request).remove(request.rank, request)
        if not request.has_begun:
            self._ages.remove(_age(request), request)

    def _lane_of(self, request: Request) -> str:
        return "" if self._counters is None else request.tenant

    def _next_lanes(self, *, with_new: bool) -> Iterator[Lane]:
        """Yield the lanes in the order in which their tenants are served. The first one is cheap to find."""
        if self._counters is None or not self._lanes:
            yield from self._lanes.values()
            return
        first = self._counters.least() or ""
        yield self._lanes[first]
        names = (name for name, lane in self._lanes.items() if name != first and (with_new or lane.returning))
        for name in heapq.nsmallest(MAX_LANES, names, key=self._counters.counter):
            yield self._lanes[name]

    def check_invariants(self) -> None:
        """Raise `InternalError` naming what is broken. O(waiting requests)."""
        new = [request for lane in self._lanes.values() for request in lane.new]
        returning = [request for lane in self._lanes.values() for request in lane.returning]
        require(all(lane.new or lane.returning for lane in self._lanes.values()), "an empty lane is left over")
        require(not any(request.has_begun for request in new), "a request that has begun counts as new")
        require(all(request.has_begun for request in returning), "a request returns that has not begun")
        for queue in (self._ages, *(queue for lane in self._lanes.values() for queue in lane)):
            keys = [_age(r) if queue is self._ages else r.rank for r in queue]
            require(keys == sorted(keys), "a queue is out of order")
        require(set(self._ages) == set(new), "new requests and their ages disagree")
        for service_class in Priority:
            num_tokens = sum((1 + len(r.followers)) * r.num_tokens for r in new if r.service_class is service_class)
            require(self._new_tokens[service_class] == num_tokens, f"tokens of {service_class.name} are miscounted")
        require(self.num_new == sum(1 + len(r.followers) for r in new), "new requests are miscounted")
        require(len(self._crowds) == len(self._num_new), "crowds are miscounted")
        for name, count in self._num_new.items():
            require(count == sum(1 + len(r.followers) for r in new if r.tenant == name), f"{name!r} is miscounted")


def next_in_line(
    waiting: Iterator[Request], num_cached_tokens: Callable[[Request], int], *, before: float, by_tenant: bool
) -> Request | None:
    """Return the one with the longest cached prefix among the first `WINDOW` of one class, `by_tenant` of one tenant.

    The first one is not overtaken if it has begun, or arrived `before` that time.
    """
    first = next(waiting, None)
    if first is None or first.has_begun or first.arrival_time <= before:
        return first

    def is_peer(request: Request) -> bool:
        return request.service_class is first.service_class and not (by_tenant and request.tenant != first.tenant)

    return max((first, *takewhile(is_peer, islice(waiting, WINDOW - 1))), key=num_cached_tokens)


def _lower(queue: SortedQueue, service_class: Priority) -> Iterator[Request]:
    """Yield requests of lower classes, the last first."""
    return takewhile(lambda request: request.service_class > service_class, reversed(queue))


def _age(request: Request) -> Rank:
    return (request.service_class, request.arrival_time, request.sequence)
