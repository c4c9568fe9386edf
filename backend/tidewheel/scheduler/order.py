"""Requests in the order of a policy: one queue, or one for each tenant."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import takewhile
from typing import Protocol

from tidewheel.kvcache.invariants import require
from tidewheel.request import Priority, Request
from tidewheel.scheduler.fairness import VirtualCounters
from tidewheel.scheduler.policy import Rank


class Order(Protocol):
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def push(self, rank: Rank, request: Request) -> None: ...
    def remove(self, rank: Rank, request: Request) -> None: ...
    def move(self, old: Rank, new: Rank, request: Request) -> None:
        """The rank has changed; the place of its tenant has not."""

    def head(self) -> Request: ...
    def leading(self, service_class: Priority) -> Iterator[Request]:
        """From the head on, while they are of the class; of several queues, the head at most."""

    def key(self, rank: Rank, tenant: str) -> Rank:
        """What compares a running request with a waiting one."""

    def check_invariants(self) -> None: ...


class SortedQueue:
    """A sorted list: the head is read every step, an insert or a removal is a binary search and one `memmove` of
    pointers, which for the thousands of entries that admission allows is cheaper than a heap's lazy deletion."""

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries)

    def push(self, rank: Rank, request: Request) -> None:
        insort(self._entries, (rank, request))  # ranks are unique: requests are never compared

    def remove(self, rank: Rank, request: Request) -> None:
        index = bisect_left(self._entries, (rank,))
        require(self._entries[index][1] is request, f"{request} does not wait where it should")
        del self._entries[index]

    def move(self, old: Rank, new: Rank, request: Request) -> None:
        self.remove(old, request)
        self.push(new, request)

    def head(self) -> Request:
        return self._entries[0][1]

    def leading(self, service_class: Priority) -> Iterator[Request]:
        return takewhile(lambda request: request.service_class is service_class, self)

    def key(self, rank: Rank, tenant: str) -> Rank:  # noqa: ARG002
        return rank

    def check_invariants(self) -> None:
        pairs = zip(self._entries, self._entries[1:], strict=False)
        require(all(a < b for (a, _), (b, _) in pairs), "a queue is out of order")


class TenantQueues:
    """A queue for each tenant that has waiting requests; the tenant with the least counter is served."""

    def __init__(self, counters: VirtualCounters) -> None:
        self._counters = counters
        self._queues: dict[str, SortedQueue] = {}
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self._queues.values() for request in queue)

    def push(self, rank: Rank, request: Request) -> None:
        queue = self._queues.get(request.tenant)
        if queue is None:
            queue = self._queues[request.tenant] = SortedQueue()
            self._counters.activate(request.tenant)
        queue.push(rank, request)
        self._num_entries += 1

    def remove(self, rank: Rank, request: Request) -> None:
        queue = self._queues[request.tenant]
        queue.remove(rank, request)
        self._num_entries -= 1
        if not queue:
            del self._queues[request.tenant]
            self._counters.deactivate(request.tenant)

    def move(self, old: Rank, new: Rank, request: Request) -> None:
        self._queues[request.tenant].move(old, new, request)

    def head(self) -> Request:
        tenant = self._counters.least()
        require(tenant is not None, "tenants wait and none is active")
        return self._queues[tenant or ""].head()

    def leading(self, service_class: Priority) -> Iterator[Request]:
        if self and self.head().service_class is service_class:
            yield self.head()

    def key(self, rank: Rank, tenant: str) -> Rank:
        return (self._counters.counter(tenant), *rank)

    def check_invariants(self) -> None:
        for queue in self._queues.values():
            queue.check_invariants()
        require(all(self._queues.values()), "a tenant without waiting requests has a queue")
        require(self._num_entries == sum(map(len, self._queues.values())), "queued requests are miscounted")
