"""Fair shares between tenants: the virtual token counter."""

from __future__ import annotations

import heapq
from collections.abc import Callable

MAX_IDLE_TENANTS = 4096  # whose counters are remembered

_MIN_STALE = 64  # heap entries of tenants that are not active any more, before they are cleared away


class VirtualCounters:
    """Service that each tenant has received, in weighted tokens over its weight; the least served goes first.

    The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with weights
    (its section on weighted VTC): a tenant is *active* while it has waiting requests, and pays

        (input_weight · prompt tokens + output_weight · output tokens) / weight

    for what it is given. A tenant that becomes active is lifted to the least counter of the active ones (or, when
    there are none, to that of the last one that was active), so that nobody saves up service by staying away. The
    service of two tenants that are both active differs by at most 2U, with U the larger of the cost of the longest
    prompt and the cost of the output that all running requests may produce.

    A call costs O(log tenants), amortised: counters only grow, so a heap entry that lags behind is brought up to
    date when it comes to the top. Beyond `MAX_IDLE_TENANTS` idle tenants, those with the least counters are
    forgotten: one that is not above the floor loses nothing by it, since the lift would bring it there anyway.
    """

    def __init__(
        self, weights: Callable[[str], float], input_weight: float = 1.0, output_weight: float = 2.0
    ) -> None:
        self._weights = weights
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._counters: dict[str, float] = {}
        self._active: dict[str, int] = {}  # order of activation: breaks ties
        self._heap: list[tuple[float, int, str]] = []
        self._num_activations = 0
        self._floor = 0.0  # least counter of the active tenants, or of the last one
        self._last = ""  # the tenant that was active last, when none is

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._counters)

    def weight(self, tenant: str) -> float:
        return self._weights(tenant)

    def activate(self, tenant: str) -> None:
        """The tenant has a waiting request, and had none before. Nothing happens if it is active."""
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
        """The last waiting request of the tenant is gone: started, or ended."""
        if self._active.pop(tenant, None) is None:
            return
        if not self._active:
            self._last = tenant
        self._refresh()
        self._forget()

    def charge(self, tenant: str, num_input: int, num_output: int) -> None:
        """The tenant is given so many tokens, whether it is active or not."""
        cost = (self._input_weight * num_input + self._output_weight * num_output) / self._weights(tenant)
        self._counters[tenant] = self._counters.get(tenant, self._floor) + cost

    def counter(self, tenant: str) -> float:
        """What the tenant would go by if it became active now."""
        return max(self._counters.get(tenant, 0.0), self._floor)

    def least(self) -> str | None:
        """The active tenant that is served next: least counter, then longest active. None if none is."""
        self._refresh()
        return self._heap[0][2] if self._heap else None

    def _refresh(self) -> None:
        """The top of the heap is the least active tenant, at its present counter; the floor follows it."""
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

    def _forget(self) -> None:
        num_idle = len(self._counters) - len(self._active)
        if num_idle <= MAX_IDLE_TENANTS:
            return
        idle = {tenant: counter for tenant, counter in self._counters.items() if tenant not in self._active}
        keep = heapq.nlargest(MAX_IDLE_TENANTS // 2, idle, key=idle.__getitem__)
        for tenant in idle.keys() - set(keep):
            del self._counters[tenant]
