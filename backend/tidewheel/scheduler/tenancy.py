import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from tidewheel.errors import Busy
from tidewheel.request import Request
from tidewheel.tenants import EVERYBODY, TenantLimits, account_of, limits_of

BURST_S = 1.0  # content of a full bucket, at least 1
MAX_BUCKETS = 8192  # without an entry
_NAME_CHARS = 40
_REQUESTS = "requests_per_s"


class TokenBucket:
    """Token bucket of `burst`, full at first, refilled at `rate` per second (RFC 2697, with debt).

    A cost over `burst` needs a full bucket and leaves a debt.
    """

    __slots__ = ("_filled_at", "_level", "burst", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.burst = max(rate * BURST_S, 1.0)
        self._level = self.burst
        self._filled_at = -math.inf

    def inherit(self, other: "TokenBucket") -> None:
        self._level, self._filled_at = min(other._level, self.burst), other._filled_at

    def level(self, now: float) -> float:
        return min(self._level + self.rate * max(now - self._filled_at, 0.0), self.burst)

    def wait_seconds(self, cost: float, now: float) -> float:
        return max(min(cost, self.burst) - self.level(now), 0.0) / self.rate

    def take(self, cost: float, now: float) -> None:
        """Take a cost, into debt if needed; a negative cost refills."""
        self._level = min(self.level(now) - cost, self.burst)
        self._filled_at = max(now, self._filled_at)


_Buckets = dict[str, TokenBucket]


class TenantTable:
    """Token buckets by tenant, or by adapter. Requests reserve tokens at admission and settle at their end.

    Tenants without an entry share the buckets of `*`, or with `each` have their own; of these, full ones are dropped,
    and beyond `MAX_BUCKETS` the least recently used.
    """

    def __init__(self, tenants: Mapping[str, TenantLimits], *, by_lora: bool = False) -> None:
        self._by_lora = by_lora
        self._named: dict[str, _Buckets] = {}
        self._unnamed: OrderedDict[str, _Buckets] = OrderedDict()  # LRU
        self.reconfigure(tenants)

    def reconfigure(self, tenants: Mapping[str, TenantLimits]) -> None:
        before = {**self._unnamed, **self._named}
        self._tenants = tenants
        self._named = {name: _make_buckets(limits, before.get(name)) for name, limits in tenants.items()}
        unnamed = {name: _make_buckets(limits_of(tenants, name), old) for name, old in self._unnamed.items()}
        self._unnamed = OrderedDict((name, made) for name, made in unnamed.items() if made and name not in tenants)

    def check(self, tenant: str, num_requests: int, num_tokens: int, now: float) -> None:
        """Raise `Busy`, with the time until the requests fit the rates."""
        account = account_of(self._tenants, tenant)
        buckets = self._named.get(account) or self._unnamed.get(account) or {}  # new ones are full
        for name, bucket in buckets.items():
            cost = num_requests if name == _REQUESTS else num_tokens
            if (seconds := bucket.wait_seconds(cost, now)) > 0.0:
                raise Busy(
                    f"{self._describe(tenant, account)} {name} of {bucket.rate:g}: "
                    f"{max(bucket.level(now), 0.0):.0f} of {bucket.burst:g} are left, and this takes {cost}",
                    retry_after_ms=math.ceil(1e3 * seconds),
                )

    def reserve(self, requests: Sequence[Request], num_tokens: int, now: float) -> None:
        for request in requests:
            request.reserved_tokens = num_tokens
        self._take(requests[0], len(requests), len(requests) * num_tokens, now)

    def settle(self, request: Request, now: float) -> None:
        """Correct the reservation by real use: nothing, if never started."""
        has_started = request.first_scheduled_time is not None
        used = request.num_tokens if has_started else 0
        self._take(request, 0 if has_started else -1, used - request.reserved_tokens, now)

    def _take(self, request: Request, num_requests: int, num_tokens: int, now: float) -> None:
        if not self._tenants or (self._by_lora and request.lora is None):
            return
        owner = request.lora.name if self._by_lora and request.lora is not None else request.tenant
        for name, bucket in self._find(account_of(self._tenants, owner), now).items():
            bucket.take(num_requests if name == _REQUESTS else num_tokens, now)

    def _find(self, account: str, now: float) -> _Buckets:
        if account in self._named:
            return self._named[account]
        if account not in self._unnamed:
            self._forget(now)
        buckets = self._unnamed.pop(account, None) or _make_buckets(limits_of(self._tenants, account))
        if buckets:
            self._unnamed[account] = buckets
        return buckets

    def _describe(self, name: str, account: str) -> str:
        kind = "adapter" if self._by_lora else "tenant"
        if account == EVERYBODY:
            return f"{kind}s without an entry are over their"
        shown = name if len(name) <= _NAME_CHARS else name[:_NAME_CHARS] + "…"
        return f"{kind} {shown!r} is over its"

    def _forget(self, now: float) -> None:
        for account, buckets in list(islice(self._unnamed.items(), 2)):
            is_full = all(bucket.level(now) >= bucket.burst for bucket in buckets.values())
            if len(self._unnamed) < MAX_BUCKETS and not is_full:
                return
            del self._unnamed[account]


def _make_buckets(limits: TenantLimits, before: _Buckets | None = None) -> _Buckets:
    rates = {_REQUESTS: limits.requests_per_s, "tokens_per_s": limits.tokens_per_s}
    buckets = {name: TokenBucket(rate) for name, rate in rates.items() if rate is not None}
    for name in buckets.keys() & (before or {}).keys():
        buckets[name].inherit((before or {})[name])
    return buckets


INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
MAX_IDLE_TENANTS = 4096

_MIN_STALE = 64  # before a rebuild


class VirtualCounters:
    """Weighted Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

    The least served tenant with waiting requests (*active*) goes first. Service costs

        (input weight · prompt tokens + output weight · output tokens) / weight of the tenant

    A tenant that becomes active starts at least at the lowest active counter, or if no tenant is active, at that of
    the last. The service of active tenants differs by at most twice the cost of the longest prompt or of all running
    outputs.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self.weight = weight
        self._counters: dict[str, float] = {}
        self._active: dict[str, int] = {}  # activation order, breaks ties
        self._heap: list[tuple[float, int, str]] = []
        self._num_activations = 0
        self._floor = 0.0
        self._last = ""  # active

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
        if len(self._counters) - len(self._active) > MAX_IDLE_TENANTS:
            idle = [tenant for tenant in self._counters if tenant not in self._active]
            for name in heapq.nsmallest(len(idle) - MAX_IDLE_TENANTS // 2, idle, key=self._counters.__getitem__):
                del self._counters[name]

    def charge(self, tenant: str, num_input: int, num_output: int) -> None:
        cost = (INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output) / self.weight(tenant)
        self._counters[tenant] = self._counters.get(tenant, self._floor) + cost

    def counter(self, tenant: str) -> float:
        return max(self._counters.get(tenant, 0.0), self._floor)

    def least(self) -> str | None:
        self._refresh()
        return self._heap[0][2] if self._heap else None

    def _refresh(self) -> None:
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
