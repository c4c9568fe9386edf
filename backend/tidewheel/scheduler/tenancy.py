"""What each tenant may have: its limits, and the token buckets that hold it to its rates."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

from tidewheel.errors import Busy
from tidewheel.tenants import EVERYBODY, NO_LIMITS, TenantLimits

BURST_S = 1.0  # a bucket holds what this time brings, and never less than one
MAX_BUCKETS = 8192  # tenants whose buckets are remembered
_NAME_CHARS = 40  # of a tenant in a message


class TokenBucket:
    """Fills at `rate` a second up to `burst`; who takes more than is there has to wait.

    In any time t it lets through at most ``rate · t + burst``. What is larger than the burst passes only when the
    bucket is full, and leaves a debt that is filled up first: then the bound is ``rate · t`` and the largest one.
    The classical token bucket, as in RFC 2697, with a debt instead of a second bucket.
    """

    __slots__ = ("_filled_at", "_level", "burst", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self.burst = max(rate * BURST_S, 1.0)
        self._level = self.burst
        self._filled_at = now

    def level(self, now: float) -> float:
        """What is there; negative: owed."""
        return min(self._level + self.rate * max(now - self._filled_at, 0.0), self.burst)

    def wait_seconds(self, cost: float, now: float) -> float:
        """Until `cost` can be taken; 0: now."""
        return max(min(cost, self.burst) - self.level(now), 0.0) / self.rate

    def take(self, cost: float, now: float) -> None:
        self._level = self.level(now) - cost
        self._filled_at = max(now, self._filled_at)

    def is_full(self, now: float) -> bool:
        return self.level(now) >= self.burst


_Buckets = tuple[TokenBucket | None, TokenBucket | None]  # of requests and of tokens


class TenantTable:
    """Limits by tenant, and what is left of them. Every call is O(1).

    Clients name tenants as they like, so memory is bounded: tenants without rates have no buckets, full buckets are
    forgotten (a new one is full too), and beyond `MAX_BUCKETS` those that were used longest ago go.
    """

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._limits = dict(limits)
        self._default = self._limits.pop(EVERYBODY, NO_LIMITS)
        self._buckets: OrderedDict[str, _Buckets] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Tenants whose buckets are remembered."""
        return len(self._buckets)

    def limits(self, tenant: str) -> TenantLimits:
        return self._limits.get(tenant, self._default)

    def check(self, tenant: str, num_requests: int, num_tokens: int, now: float) -> None:
        """Raises `Busy`, with the time until the buckets have enough. Changes nothing."""
        buckets = self._buckets.get(tenant)
        if buckets is None:  # full ones let everything pass
            return
        for name, cost, bucket in zip(
            ("requests_per_s", "tokens_per_s"), (num_requests, num_tokens), buckets, strict=True
        ):
            seconds = 0.0 if bucket is None else bucket.wait_seconds(cost, now)
            if bucket is not None and seconds > 0.0:
                shown = tenant if len(tenant) <= _NAME_CHARS else tenant[:_NAME_CHARS] + "…"
                raise Busy(
                    f"tenant {shown!r} is over its {name} of {bucket.rate:g}: "
                    f"{max(bucket.level(now), 0.0):.0f} of {bucket.burst:g} are left, and this takes {cost}",
                    retry_after_ms=math.ceil(1e3 * seconds),
                )

    def charge(self, tenant: str, num_requests: int, num_tokens: int, now: float) -> None:
        """What was admitted, after `check`."""
        buckets = self._buckets.get(tenant)
        if buckets is None:
            buckets = self._make(tenant, now)
            if buckets is None:
                return
        self._buckets.move_to_end(tenant)
        for bucket, cost in zip(buckets, (num_requests, num_tokens), strict=True):
            if bucket is not None:
                bucket.take(cost, now)

    def _make(self, tenant: str, now: float) -> _Buckets | None:
        limits = self.limits(tenant)
        if limits.requests_per_s is None and limits.tokens_per_s is None:
            return None
        self._forget(now)
        rates = (limits.requests_per_s, limits.tokens_per_s)
        requests, tokens = (None if rate is None else TokenBucket(rate, now) for rate in rates)
        self._buckets[tenant] = (requests, tokens)
        return requests, tokens

    def _forget(self, now: float) -> None:
        """Before one comes, up to two go: the table shrinks again after a crowd has passed."""
        for _ in range(2):
            if not self._buckets:
                return
            tenant, buckets = next(iter(self._buckets.items()))
            if len(self._buckets) < MAX_BUCKETS and not all(b is None or b.is_full(now) for b in buckets):
                return
            del self._buckets[tenant]
