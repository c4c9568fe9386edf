"""The requests that wait for a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from tidewheel.kvcache.invariants import require
from tidewheel.request import Priority, Request, RequestState
from tidewheel.scheduler.fairness import VirtualCounters
from tidewheel.scheduler.order import Order, SortedQueue, TenantQueues
from tidewheel.scheduler.policy import Policy, Rank, rank


class WaitingSet:
    """Waiting, preempted and parked requests.

    *Parked* are those whose leader is still to compute the prompt that they share: they have a rank and count like
    the others, and stand in the queue only once their leader lets them.
    """

    def __init__(self, policy: Policy, counters: VirtualCounters | None = None) -> None:
        """`counters`: of a policy that lets tenants take turns."""
        self._policy = policy
        self._counters = counters
        self._order: Order = SortedQueue() if counters is None else TenantQueues(counters)
        self._ranks: dict[str, Rank] = {}
        self._parked: dict[str, dict[str, Request]] = {}  # by leader
        self._new: dict[Priority, list[tuple[float, float, Request]]] = {p: [] for p in Priority}  # by service class
        self._new_tokens = dict.fromkeys(Priority, 0)
        self._new_by_tenant: Counter[str] = Counter()
        self._by_class = dict.fromkeys(Priority, 0)
        self.num_tokens = 0  # prompt, and output of preempted requests
        self.num_new = 0  # never started: what admission bounds

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Request]:
        yield from self._order
        for children in self._parked.values():
            yield from children.values()

    @property
    def has_head(self) -> bool:
        return len(self._order) > 0

    @property
    def by_class(self) -> tuple[int, int, int, int]:
        """By the class that was asked for."""
        critical, high, normal, low = self._by_class.values()
        return critical, high, normal, low

    @property
    def num_new_tokens(self) -> int:
        return sum(self._new_tokens.values())

    @property
    def lowest_class(self) -> int:
        """A newcomer of this class or a lower one takes nobody's place, whoever it is; over LOW: it may."""
        if self._counters is not None:
            return Priority.LOW + 1
        return max((p for p, entries in self._new.items() if entries), default=0)

    @property
    def oldest_arrival(self) -> float | None:
        """Of those that never started."""
        return min((entries[0][0] for entries in self._new.values() if entries), default=None)

    def oldest(self, service_class: Priority) -> Request | None:
        """First arrival of those in the class that never started."""
        entries = self._new[service_class]
        return entries[0][2] if entries else None

    def push(self, request: Request, sequence: int) -> None:
        """`sequence`: number of the arrival, the same whenever the request comes back."""
        place = self._enlist(request, sequence)
        self._order.push(place, request)

    def park(self, request: Request, sequence: int, leader: Request) -> None:
        self._enlist(request, sequence)
        self._parked.setdefault(leader.request_id, {})[request.request_id] = request

    def release(self, leader: Request) -> None:
        """Who was parked behind the leader stands in the queue from now on."""
        for request in self._parked.pop(leader.request_id, {}).values():
            self._order.push(self._ranks[request.request_id], request)

    def has_parked(self, leader: Request) -> bool:
        return leader.request_id in self._parked

    def head(self) -> Request:
        """The next one to enter; only if `has_head`."""
        return self._order.head()

    def leading(self, service_class: Priority) -> Iterator[Request]:
        return self._order.leading(service_class)

    def rank_of(self, request: Request) -> Rank:
        return self._ranks[request.request_id]

    def head_key(self) -> Rank:
        head = self._order.head()
        return self.key(self._ranks[head.request_id], head.tenant)

    def key(self, rank: Rank, tenant: str) -> Rank:
        """Makes ranks of running and waiting requests comparable at this moment."""
        return self._order.key(rank, tenant)

    def remove(self, request: Request) -> Rank:
        """Takes the request out, wherever it stands; its rank."""
        place = self._ranks.pop(request.request_id)
        self._by_class[request.priority] -= 1
        self.num_tokens -= request.num_tokens
        if request.state is RequestState.WAITING:
            self._forget_new(place, request)
        siblings = self._siblings(request)
        if siblings is None:
            self._order.remove(place, request)
        else:
            del siblings[request.request_id]
            if not siblings and request.leader is not None:
                del self._parked[request.leader.request_id]
        return place

    def reclassify(self, request: Request, service_class: Priority, *, is_overdue: bool = False) -> None:
        """The request waits in this class from now on, as one that is overdue or in the policy's own order."""
        old = self._ranks[request.request_id]
        is_new = request.state is RequestState.WAITING
        if is_new:
            self._forget_new(old, request)
        request.service_class = service_class
        new = self._ranks[request.request_id] = rank(self._policy, request, int(old[-1]), is_overdue=is_overdue)
        if is_new:
            self._enlist_new(new, request)
        if self._siblings(request) is None:
            self._order.move(old, new, request)

    def evictable(self, better_class: Priority) -> Iterator[Request]:
        """Those that never started, for the sake of a class: the lowest class first, in it the newest."""
        for service_class in sorted(Priority, reverse=True):
            if service_class <= better_class:
                return
            for _, _, request in reversed(self._new[service_class]):
                yield request

    def displaceable(self, newcomer: Request, count: int, service_class: Priority) -> Iterator[Request]:
        """Those that never started, in the order in which `count` newcomers like this one take their places.

        Where tenants take turns they take places of the tenant that has most of them over its weight, while that is
        more than the newcomer's would then have; else those of lower classes among the newcomer's own, which then has
        fewer.
        """
        if self._counters is None:
            yield from self.evictable(service_class)
            return
        weight = self._counters.weight
        waiting = Counter(self._new_by_tenant)
        own = waiting.pop(newcomer.tenant, 0) + count
        newest = {tenant: self._newest_of(tenant) for tenant in waiting}
        lower = (request for request in self.evictable(service_class) if request.tenant == newcomer.tenant)
        while True:
            biggest = max(waiting, key=lambda tenant: (waiting[tenant] / weight(tenant), tenant), default=None)
            if biggest is not None and waiting[biggest] / weight(biggest) > own / weight(newcomer.tenant):
                yield next(newest[biggest])
                waiting[biggest] -= 1
                continue
            victim = next(lower, None)
            if victim is None:
                return
            yield victim
            own -= 1

    def num_tokens_ahead(self, service_class: Priority) -> int:
        """Of requests that never started, in this class and better ones."""
        return sum(count for p, count in self._new_tokens.items() if p <= service_class)

    def check_invariants(self) -> None:
        self._order.check_invariants()
        everybody = list(self)
        require({r.request_id for r in everybody} == self._ranks.keys(), "queue and ranks disagree")
        require(len(everybody) == len(self._ranks), "a request waits twice")
        new = [request for request in everybody if request.state is RequestState.WAITING]
        require(self.num_tokens == sum(request.num_tokens for request in everybody), "waiting tokens are miscounted")
        require(self.num_new == len(new), "new requests are miscounted")
        require(self.num_new_tokens == sum(request.num_tokens for request in new), "new tokens are miscounted")
        require(sum(self.by_class) == len(everybody), "classes are miscounted")
        for service_class, entries in self._new.items():
            require(entries == sorted(entries), f"class {service_class.name} is out of order")
            for *_, request in entries:
                require(request.service_class is service_class, f"{request} is in another class")
            num_tokens = sum(request.num_tokens for *_, request in entries)
            require(self._new_tokens[service_class] == num_tokens, f"tokens of {service_class.name} are miscounted")
        tenants = Counter(request.tenant for request in new)
        require(tenants == self._new_by_tenant, "new requests of tenants are miscounted")
        listed = {request.request_id for entries in self._new.values() for *_, request in entries}
        require(listed == {request.request_id for request in new}, "new requests and their classes disagree")

    def _siblings(self, request: Request) -> dict[str, Request] | None:
        """Those that it is parked with; None if it stands in the queue."""
        if request.leader is None:
            return None
        siblings = self._parked.get(request.leader.request_id)
        return siblings if siblings is not None and request.request_id in siblings else None

    def _enlist(self, request: Request, sequence: int) -> Rank:
        place = self._ranks[request.request_id] = rank(self._policy, request, sequence)
        self._by_class[request.priority] += 1
        self.num_tokens += request.num_tokens
        if request.state is RequestState.WAITING:
            self._enlist_new(place, request)
        return place

    def _enlist_new(self, place: Rank, request: Request) -> None:
        insort(self._new[request.service_class], (request.arrival_time, place[-1], request))
        self._new_tokens[request.service_class] += request.num_tokens
        self._new_by_tenant[request.tenant] += 1
        self.num_new += 1

    def _forget_new(self, place: Rank, request: Request) -> None:
        entries = self._new[request.service_class]
        del entries[bisect_left(entries, (request.arrival_time, place[-1]))]
        self._new_tokens[request.service_class] -= request.num_tokens
        self._new_by_tenant[request.tenant] -= 1
        if not self._new_by_tenant[request.tenant]:
            del self._new_by_tenant[request.tenant]
        self.num_new -= 1

    def _newest_of(self, tenant: str) -> Iterator[Request]:
        """Those of one tenant that never started: the lowest class first, in it the newest."""
        for service_class in sorted(Priority, reverse=True):
            for _, _, request in reversed(self._new[service_class]):
                if request.tenant == tenant:
                    yield request
