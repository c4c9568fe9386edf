"""Fair shares between tenants: the virtual token counter."""

from __future__ import annotations

import heapq
from collections.abc import Callable

INPUT_WEIGHT = 1.0  # cost of a prompt token
OUTPUT_WEIGHT = 2.0  # cost of an output token
MAX_IDLE_TENANTS = 4096  # whose counters are remembered

_MIN_STALE = 64  # heap entries of inactive tenants before they are removed


class VirtualCounters:
    """Service that each tenant has received, in weighted tokens over its weight; the least served goes first.

    The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with weights
    (its section on weighted VTC). A tenant is *active* while it has waiting requests. It pays for what it is given:

        (input weight · prompt tokens + output weight · output tokens) / weight of the tenant

    A tenant that becomes active is lifted to the least counter of the active ones or, if there are none, of the
    tenant that was active last. So no tenant saves up service by staying away. The service of two active tenants
    differs by at most 2U, with U the larger of the cost of the longest prompt and the cost of the output that all
    running requests may produce.

    A call costs O(log tenants), amortised: counters only grow, so a heap entry is brought up to date when it comes to
    the top. Beyond `MAX_IDLE_TENANTS` idle tenants, the ones with the least counters are forgotten. One that is not
    above the floor loses nothing by it: the lift would bring it there anyway.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self.weight = weight
        self._counters: dict[str, float] = {}
        self._active: dict[str, int] = {}  # order of activation: breaks ties
        self._heap: list[tuple[float, int, str]] = []
        self._num_activations = 0
        self._floor = 0.0  # least counter of the active tenants, or of the last one
        self._last = ""  # the tenant that was active last, when none is

    def activate(self, tenant: str) -> None:
        """Note that the tenant has waiting requests. Changes nothing if it is active."""
        if tenant in self._active:
            return
        self._refresh()
        counter = self._counters[tenant] = self.counter(tenant)
        self._num_activations += 1
        self._active[tenant] = self._num_activations
        heapq.heappush(self._heap, (counter, self._num_activations, tenant))
        if len(self._heap) > 2 * len(self._active) + _MIN_STALE:
            self._heap = [entry for entry in self._heap if self._active.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def deactivate(self, tenant: str) -> None:
        """Note that the tenant has no waiting requests. Changes nothing if it is not active."""
        if self._active.pop(tenant, None) is None:
            return
        if not self._active:
            self._last = tenant
        self._refresh()
        if len(self._counters) - len(self._active) > MAX_IDLE_TENANTS:
            idle = [tenant for tenant in self._counters if tenant not in self._active]
            for name in heapq.nsmallest(len(idle) - MAX_IDLE_TENANTS // 2, idle, key=self._counters.__getitem__):
                del self._counters[name]

    def charge(self, tenant: str, num_input: int, num_output: int) -> None:
        """Charge the tenant, active or not, for tokens."""
        cost = (INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output) / self.weight(tenant)
        self._counters[tenant] = self._counters.get(tenant, self._floor) + cost

    def counter(self, tenant: str) -> float:
        """Return the counter that the tenant would have if it became active now."""
        return max(self._counters.get(tenant, 0.0), self._floor)

    def least(self) -> str | None:
        """Return the active tenant that is served next: least counter, then longest active. None if none is."""
        self._refresh()
        return self._heap[0][2] if self._heap else None

    def _refresh(self) -> None:
        """Bring the least active tenant, at its present counter, to the top of the heap; the floor follows it."""
        heap = self._heap
        while heap:
            counter, order, tenant = heap[0]
            if self._active.get(tenant) != order:
                heapq.heappop(heap)
            elif self._counters[tenant] > counter:
                heapq.heapreplace(heap, (self._counters[tenant], order, tenant))
            else:
                self._floor = max(self._floor, counter)
                return
        self._floor = max(self._floor, self._counters.get(self._last, 0.0))
