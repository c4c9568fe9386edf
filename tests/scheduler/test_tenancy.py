"""Rates by tenant: never more than the bucket lets through, hints that are true, bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.errors import Busy
from tidewheel.scheduler import tenancy
from tidewheel.scheduler.tenancy import TenantTable, TokenBucket
from tidewheel.tenants import TenantLimits


@given(
    rate=st.floats(0.1, 1000.0),
    offers=st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 3000)), min_size=1, max_size=40),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_no_interval_lets_through_more_than_rate_and_burst(rate: float, offers: list[tuple[float, int]]) -> None:
    bucket, now, admitted = TokenBucket(rate, 0.0), 0.0, []
    for gap, cost in offers:
        now += gap
        if bucket.wait_seconds(cost, now) == 0.0:
            bucket.take(cost, now)
            admitted.append((now, cost))
    for first, (begin, _) in enumerate(admitted):
        total, largest = 0, 0
        for end, cost in admitted[first:]:
            total, largest = total + cost, max(largest, cost)
            assert total <= rate * (end - begin) + max(bucket.burst, largest) + 1e-6 * total


@given(rate=st.floats(0.1, 1000.0), taken=st.integers(1, 3000), cost=st.integers(1, 3000), now=st.floats(0.0, 1e6))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_who_waits_as_told_passes(rate: float, taken: int, cost: int, now: float) -> None:
    bucket = TokenBucket(rate, now)
    bucket.take(taken, now)
    seconds = bucket.wait_seconds(cost, now)
    assert bucket.wait_seconds(cost, now + seconds) == pytest.approx(0.0, abs=1e-6)
    if seconds > 1e-3:
        assert bucket.wait_seconds(cost, now + 0.9 * seconds) > 0.0


def test_time_that_goes_back_fills_nothing() -> None:
    bucket = TokenBucket(10.0, 100.0)
    bucket.take(10, 100.0)
    bucket.take(0, 50.0)
    assert bucket.level(100.0) == 0.0


def table(**limits: float) -> TenantTable:
    return TenantTable({"acme": TenantLimits(**limits), "*": TenantLimits(weight=2.0)})


def test_limits_are_the_tenants_own_or_everybodys() -> None:
    assert table(weight=5.0).limits("acme").weight == 5.0
    assert table(weight=5.0).limits("other").weight == 2.0
    assert TenantTable({}).limits("other") == TenantLimits()


def test_a_tenant_over_its_requests_is_told_when_to_come_back() -> None:
    tenants = table(requests_per_s=4.0)
    for _ in range(4):
        tenants.check("acme", 1, 100, 10.0)
        tenants.charge("acme", 1, 100, 10.0)
    with pytest.raises(
        Busy, match="'acme' is over its requests_per_s of 4: 0 of 4 are left, and this takes 1"
    ) as caught:
        tenants.check("acme", 1, 100, 10.0)
    assert caught.value.retry_after_ms == 250
    tenants.check("acme", 1, 100, 10.25)


def test_a_tenant_over_its_tokens_is_refused_and_others_are_not() -> None:
    tenants = table(tokens_per_s=1000.0)
    tenants.check("acme", 1, 800, 0.0)
    tenants.charge("acme", 1, 800, 0.0)
    with pytest.raises(Busy, match="tokens_per_s of 1000: 200 of 1000 are left, and this takes 500"):
        tenants.check("acme", 1, 500, 0.0)
    tenants.check("acme", 1, 200, 0.0)
    tenants.check("other", 1, 1 << 30, 0.0)


def test_a_request_above_the_burst_passes_when_the_bucket_is_full_and_is_paid_off() -> None:
    tenants = table(tokens_per_s=100.0)
    tenants.check("acme", 1, 1000, 0.0)
    tenants.charge("acme", 1, 1000, 0.0)
    with pytest.raises(Busy) as caught:
        tenants.check("acme", 1, 1, 0.0)
    assert caught.value.retry_after_ms == 9010


def test_check_changes_nothing() -> None:
    tenants = table(requests_per_s=1.0)
    for _ in range(10):
        tenants.check("acme", 1, 1, 0.0)
    assert len(tenants) == 0


def test_a_long_name_is_cut_in_the_message() -> None:
    tenants = TenantTable({"*": TenantLimits(requests_per_s=1.0)})
    tenants.charge("x" * 1000, 1, 1, 0.0)
    with pytest.raises(Busy) as caught:
        tenants.check("x" * 1000, 1, 1, 0.0)
    assert len(caught.value.message) < 200


def test_memory_is_bounded_and_shrinks_when_the_crowd_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "MAX_BUCKETS", 100)
    tenants = TenantTable({"*": TenantLimits(requests_per_s=1.0)})
    for number in range(1000):
        tenants.charge(f"visitor-{number}", 1, 1, 0.0)
        assert len(tenants) <= 100
    for number in range(200):
        tenants.charge(f"later-{number}", 1, 1, 10.0 + 2.0 * number)
    assert len(tenants) <= 2


def test_who_is_still_in_debt_is_remembered_while_there_is_room() -> None:
    tenants = TenantTable({"*": TenantLimits(tokens_per_s=1.0)})
    tenants.charge("debtor", 1, 1000, 0.0)
    for number in range(100):
        tenants.charge(f"visitor-{number}", 1, 1, 1.0)
    with pytest.raises(Busy):
        tenants.check("debtor", 1, 1, 100.0)


def test_tenants_without_rates_leave_nothing_behind() -> None:
    tenants = table(weight=2.0)
    tenants.charge("acme", 1, 1000, 0.0)
    assert len(tenants) == 0
