from __future__ import annotations

import heapq
from collections.abc import Callable

INPUT_WEIGHT = 1.0  # per prompt token
OUTPUT_WEIGHT = 2.0  # per output token
MAX_IDLE_TENANTS = 4096  # remembered

_MIN_STALE = 64  # before a rebuild


class VirtualCounters:
    """Weighted Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

    The least served tenant goes first. A tenant with waiting requests is *active*. Service costs

        (input weight · prompt tokens + output weight · output tokens) / weight of the tenant

    Activation lifts a tenant to the least active counter, or else to the last active tenant's, so absence saves up
    nothing. The service of active tenants differs by at most 2U: U is the larger of the costs of the longest prompt
    and of all outputs of running requests.

    Calls cost O(log tenants) amortised: counters only grow, so heap entries are updated at the top. Beyond
    `MAX_IDLE_TENANTS`, idle tenants with the least counters are forgotten.
    """

    def __init__(self, weight: Callable[[str], float], max_idle: int = MAX_IDLE_TENANTS) -> None:
        self.weight = weight
        self._max_idle = max_idle
        self._counters: dict[str, float] = {}
        self._active: dict[str, int] = {}  # activation order, breaks ties
        self._heap: list[tuple[float, int, str]] = []
        self._num_activations = 0
        self._floor = 0.0
        self._last = ""  # last active tenant

    def activate(self, tenant: str) -> None:
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
        if self._active.pop(tenant, None) is None:
            return
        if not self._active:
            self._last = tenant
        self._refresh()
        if len(self._counters) - len(self._active) > self._max_idle:
            idle = [tenant for tenant in self._counters if tenant not in self._active]
            for name in heapq.nsmallest(len(idle) - self._max_idle // 2, idle, key=self._counters.__getitem__):
                del self._counters[name]

    def charge(self, tenant: str, num_input: int, num_output: int) -> None:
        cost = (INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output) / self.weight(tenant)
        self._counters[tenant] = self._counters.get(tenant, self._floor) + cost

    def counter(self, tenant: str) -> float:
        """Return the counter that activation would set."""
        return max(self._counters.get(tenant, 0.0), self._floor)

    def least(self) -> str | None:
        self._refresh()
        return self._heap[0][2] if self._heap else None

    def _refresh(self) -> None:
        """Bring the least active counter to the top of the heap, and raise the floor to it."""
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
