import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, takewhile
from operator import attrgetter
from typing import NamedTuple

from tidewheel.errors import InternalError
from tidewheel.request import Priority, Request
from tidewheel.scheduler.policy import Policy, Rank, rank_of
from tidewheel.scheduler.tenancy import VirtualCounters
from tidewheel.tenants import TenantLimits, limits_of

MAX_DISPLACED = 16  # per arrival
MAX_LANES = 16  # tenants tried after the next one
WINDOW = 64  # requests compared

_rank, _age = attrgetter("rank"), attrgetter("arrival_time", "sequence")  # places in a queue, and by arrival


class TenantQueues(NamedTuple):
    """Requests of a tenant by rank."""

    new: list[Request]  # never started
    returning: list[Request]  # preempted, or the leader has started


class WaitingSet:
    """Waiting requests in order of service, by tenant if tenants take turns. A leader stands for its group."""

    def __init__(self, policy: Policy, counters: VirtualCounters | None, tenants: Mapping[str, TenantLimits]) -> None:
        self._policy = policy
        self._counters = counters
        self._tenants = tenants
        self._lanes: dict[str, TenantQueues] = {}
        self._ages: dict[Priority, list[Request]] = {priority: [] for priority in Priority}  # new ones, by arrival
        self._new_tokens = dict.fromkeys(Priority, 0)
        self._num_new: dict[str, int] = {}
        self._crowds: list[tuple[float, str]] = []  # (new requests / weight, tenant), ascending
        self.num_new = 0  # bounded by admission

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __iter__(self) -> Iterator[Request]:
        return (request for lane in self._lanes.values() for queue in lane for request in queue)

    @property
    def num_new_tokens(self) -> int:
        return sum(self._new_tokens.values())

    def own_part(self, request: Request) -> str:
        """Return the tenant's new requests, for an error; empty without fairness."""
        return "" if self._counters is None else f" ({self._num_new.get(request.tenant, 0)} of its own tenant)"

    @property
    def lowest_class(self) -> int:
        """Lowest class of new requests: only higher classes displace. LOW + 1: any may."""
        if self._counters is not None:
            return Priority.LOW + 1
        return next((service_class for service_class in reversed(Priority) if self._ages[service_class]), 0)

    @property
    def oldest_arrival(self) -> float | None:
        return min((request.arrival_time for request in self.oldest_by_class() if request is not None), default=None)

    def oldest_by_class(self) -> list[Request | None]:
        return [requests[0] if requests else None for requests in self._ages.values()]

    def num_tokens_ahead(self, service_class: Priority) -> int:
        """Return the prompt tokens ahead of a request that arrives in the class; 0 if tenants take turns."""
        policy = self._policy
        if policy.by_tenant:
            return 0
        last = service_class if policy.by_arrival else service_class - 1
        return sum(count for p, count in self._new_tokens.items() if p <= last or not policy.by_class)

    def push(self, request: Request) -> None:
        request.rank = rank_of(self._policy, request)
        name = self._lane_of(request)
        if name not in self._lanes:
            self._lanes[name] = TenantQueues([], [])
            if self._counters is not None:
                self._counters.activate(name)
        self._insert(self._lanes[name], request)

    def remove(self, request: Request) -> None:
        name = self._lane_of(request)
        lane = self._lanes[name]
        self._take(lane, request)
        if not lane.new and not lane.returning:
            del self._lanes[name]
            if self._counters is not None:
                self._counters.deactivate(name)

    def count(self, request: Request, change: int) -> None:
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
        lane = self._lanes[self._lane_of(request)]
        self._take(lane, request)
        request.service_class = service_class
        request.rank = rank_of(self._policy, request, is_overdue=is_overdue)
        self._insert(lane, request)

    def candidates(self, *, with_new: bool) -> Iterator[Request]:
        """Yield requests in order of service. The set must not change meanwhile."""
        for lane in self._next_lanes(with_new=with_new):
            if with_new and lane.returning:
                yield from heapq.merge(lane.returning, lane.new, key=_rank)
            else:
                yield from lane.new if with_new else lane.returning

    def key(self, request: Request) -> Rank:
        return request.rank if self._counters is None else (self._counters.counter(request.tenant), *request.rank)

    def displaceable(self, newcomer: Request, count: int, service_class: Priority) -> Iterator[Request]:
        """Yield the waiting sequences that a newcomer, first of `count` sequences, may displace, in order.

        Without fairness: lower classes, lowest and newest first. With fairness, in turn:
        1. lower classes of tenants whose `max_priority` is below the newcomer's class;
        2. requests of the tenant with most requests per weight, while it has more than the newcomer's tenant, in
           classes that the latter may ask for;
        3. lower classes of the newcomer's tenant.
        """
        if self._counters is None:
            yield from self._lower(service_class)
            return
        weight, tenant, tenants = self._counters.weight, newcomer.tenant, self._tenants
        outranked = []
        for victim in islice(self._lower(service_class), WINDOW):
            if victim.tenant != tenant and limits_of(tenants, victim.tenant).max_priority > service_class:
                outranked.append(victim)
                yield victim
        counts = {victim.tenant: self._num_new[victim.tenant] for victim in outranked}
        for victim in outranked:
            counts[victim.tenant] -= 1 + len(victim.followers)
        names = [name for _, name in self._crowds[-MAX_DISPLACED - 1 :] if name != tenant]
        crowds = sorted((counts.get(name, self._num_new[name]) / weight(name), name) for name in names)
        entries = {name: (one for one in reversed(self._lanes[name].new) if one not in outranked) for name in names}
        own_queue = self._lanes[tenant].new if tenant in self._lanes else []
        lower = takewhile(lambda request: request.service_class > service_class, reversed(own_queue))
        own = self._num_new.get(tenant, 0) + count
        while True:
            if crowds and crowds[-1][0] > own / weight(tenant):
                _, name = crowds.pop()
                victim = next(entries[name])
                if max(victim.priority, victim.service_class) < limits_of(tenants, tenant).max_priority:
                    continue
                counts[name] = counts.get(name, self._num_new[name]) - 1 - len(victim.followers)
                insort(crowds, (counts[name] / weight(name), name))
            else:
                if (own_victim := next(lower, None)) is None:
                    return
                victim = own_victim
                own -= 1 + len(victim.followers)
            yield victim

    def _lower(self, service_class: Priority) -> Iterator[Request]:
        """Yield new requests of lower classes, lowest and newest first."""
        return (one for lower in reversed(Priority) if lower > service_class for one in reversed(self._ages[lower]))

    def _insert(self, lane: TenantQueues, request: Request) -> None:
        insort(lane.new if request.is_new else lane.returning, request, key=_rank)
        if request.is_new:
            insort(self._ages[request.service_class], request, key=_age)
            self.count(request, 1 + len(request.followers))

    def _take(self, lane: TenantQueues, request: Request) -> None:
        _remove(lane.new if request.is_new else lane.returning, request, _rank)
        if request.is_new:
            _remove(self._ages[request.service_class], request, _age)
            self.count(request, -1 - len(request.followers))

    def _lane_of(self, request: Request) -> str:
        return "" if self._counters is None else request.tenant

    def _next_lanes(self, *, with_new: bool) -> Iterator[TenantQueues]:
        if self._counters is None or not self._lanes:
            yield from self._lanes.values()
            return
        first = self._counters.least() or ""
        yield self._lanes[first]
        names = (name for name, lane in self._lanes.items() if name != first and (with_new or lane.returning))
        for name in heapq.nsmallest(MAX_LANES, names, key=self._counters.counter):
            yield self._lanes[name]


def next_in_line(
    waiting: Iterator[Request], num_cached_tokens: Callable[[Request], int], *, before: float, by_tenant: bool
) -> Request | None:
    """Return the request with the longest cached prefix among the first `WINDOW` in line of one class.

    If the first in line arrived by `before` or has started, return it. With `by_tenant`, look at its tenant only. No
    request overtakes a started one.
    """
    first = next(waiting, None)
    if first is None or not first.is_new or first.arrival_time <= before:
        return first

    def is_peer(request: Request) -> bool:
        is_of_tenant = not by_tenant or request.tenant == first.tenant
        return request.service_class is first.service_class and is_of_tenant and request.is_new

    return max((first, *takewhile(is_peer, islice(waiting, WINDOW - 1))), key=num_cached_tokens)


def _remove(queue: list[Request], request: Request, key: Callable[[Request], Rank]) -> None:
    index = bisect_left(queue, key(request), key=key)
    if index == len(queue) or queue[index] is not request:
        raise InternalError(f"invariant broken: {request} does not wait where it should")
    del queue[index]
