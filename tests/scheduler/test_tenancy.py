"""Rates by tenant: true bounds and hints, settled to the token, with bounded memory."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.scheduler.scheduling import make_request
from tidewheel.errors import Busy
from tidewheel.request import Request
from tidewheel.scheduler import tenancy
from tidewheel.scheduler.tenancy import TenantTable, TokenBucket
from tidewheel.tenants import TenantLimits

EXAMPLES = settings(max_examples=300, deadline=None, derandomize=True)


@given(
    rate=st.floats(0.1, 1000.0),
    offers=st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 3000)), min_size=1, max_size=40),
)
@EXAMPLES
def test_no_interval_lets_through_more_than_rate_and_burst(rate: float, offers: list[tuple[float, int]]) -> None:
    bucket, now, admitted = TokenBucket(rate), 0.0, []
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
@EXAMPLES
def test_a_request_that_waits_as_told_passes(rate: float, taken: int, cost: int, now: float) -> None:
    bucket = TokenBucket(rate)
    bucket.take(taken, now)
    seconds = bucket.wait_seconds(cost, now)
    assert bucket.wait_seconds(cost, now + seconds) == pytest.approx(0.0, abs=1e-6)
    if seconds > 1e-3:
        assert bucket.wait_seconds(cost, now + 0.9 * seconds) > 0.0


@given(
    rate=st.floats(0.1, 1000.0),
    changes=st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(-3000, 3000)), max_size=40),
)
@EXAMPLES
def test_a_bucket_never_holds_more_than_its_burst(rate: float, changes: list[tuple[float, int]]) -> None:
    bucket, now = TokenBucket(rate), 0.0
    for gap, cost in changes:
        now += gap
        bucket.take(cost, now)
        assert bucket.level(now) <= bucket.burst


def test_time_that_goes_back_fills_nothing() -> None:
    bucket = TokenBucket(10.0)
    bucket.take(10, 100.0)
    bucket.take(0, 50.0)
    assert bucket.level(100.0) == 0.0


# --- reserve and settle -------------------------------------------------------------------------------------------


def asked(tenant: str = "t", prompt: int = 4) -> Request:
    return make_request("a", prompt=prompt, tenant=tenant, max_tokens=1000)


def ended(request: Request, num_output_tokens: int | None) -> Request:
    """None: it never started."""
    if num_output_tokens is not None:
        request.first_scheduled_time = 0.0
        request.output_token_ids = [0] * num_output_tokens
    return request


def tokens_left(tenants: TenantTable, now: float, tenant: str = "t") -> float:
    return tenants._named[tenant]["tokens_per_s"].level(now)


# Seconds before it is asked for and until it ends, prompt, prediction, output; no output: it never started.
LIVES = st.tuples(
    st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.integers(1, 400), st.integers(1, 400),
    st.one_of(st.none(), st.integers(0, 800)),
)  # fmt: skip
Life = tuple[float, float, int, int, int | None]


@given(rate=st.floats(1.0, 1000.0), lives=st.lists(LIVES, max_size=30))
@EXAMPLES
def test_requests_that_are_settled_at_once_cost_what_they_used(rate: float, lives: list[Life]) -> None:
    """Whatever was predicted, the bucket is where it would be if the truth had been known."""
    tenants, true_bucket, now = TenantTable({"t": TenantLimits(tokens_per_s=rate)}), TokenBucket(rate), 0.0
    for gap, _, prompt, predicted, output in lives:
        now += gap
        request = asked(prompt=prompt)
        tenants.reserve([request], prompt + predicted, now)
        tenants.settle(ended(request, output), now)
        true_bucket.take(0 if output is None else prompt + output, now)
        assert tokens_left(tenants, now) == pytest.approx(true_bucket.level(now), abs=1e-6)


@given(rate=st.floats(1.0, 1000.0), lives=st.lists(LIVES, max_size=30))
@EXAMPLES
def test_any_history_of_requests_leaves_what_came_in_less_what_was_used(rate: float, lives: list[Life]) -> None:
    """With lives that overlap: equal while nothing overflowed, and never more than that, nor more than the burst."""
    tenants, now, has_overflowed = TenantTable({"t": TenantLimits(tokens_per_s=rate)}), 0.0, False
    events: list[tuple[float, int, str]] = []
    for number, (gap, seconds, *_) in enumerate(lives):
        now += gap
        events += [(now, number, "reserve"), (now + seconds, number, "settle")]
    requests: dict[int, Request] = {}
    burst, used, level, last = max(rate, 1.0), 0, max(rate, 1.0), 0.0
    for moment, number, what in sorted(events):
        _, _, prompt, predicted, output = lives[number]
        level, last = level + rate * (moment - last), moment
        has_overflowed |= level > burst + 1e-6
        if what == "reserve":
            requests[number] = asked(prompt=prompt)
            tenants.reserve([requests[number]], prompt + predicted, moment)
            level -= prompt + predicted
        else:
            tenants.settle(ended(requests[number], output), moment)
            truth = 0 if output is None else prompt + output
            used += truth
            level += prompt + predicted - truth
            has_overflowed |= level > burst + 1e-6
        assert tokens_left(tenants, moment) <= min(burst, level) + 1e-6
    assert tokens_left(tenants, last) <= burst + rate * last - used + 1e-6
    if not has_overflowed:
        assert tokens_left(tenants, last) == pytest.approx(min(burst, burst + rate * last - used), abs=1e-6)


def test_a_request_that_never_started_gives_its_place_in_the_count_back() -> None:
    tenants = TenantTable({"t": TenantLimits(requests_per_s=2.0)})
    requests = [asked(), asked()]
    tenants.reserve(requests, 10, 0.0)
    with pytest.raises(Busy):
        tenants.check("t", 1, 10, 0.0)
    tenants.settle(requests[0], 0.0)
    tenants.check("t", 1, 10, 0.0)
    tenants.settle(ended(requests[1], 3), 0.0)
    with pytest.raises(Busy):
        tenants.check("t", 2, 10, 0.0)


def test_output_beyond_the_prediction_is_a_debt() -> None:
    tenants = TenantTable({"t": TenantLimits(tokens_per_s=100.0)})
    request = asked(prompt=50)
    tenants.reserve([request], 60, 0.0)
    tenants.settle(ended(request, 350), 0.0)
    with pytest.raises(Busy, match="0 of 100 are left") as caught:
        tenants.check("t", 1, 100, 0.0)
    assert caught.value.retry_after_ms == 4000


# --- refusals -----------------------------------------------------------------------------------------------------


def table(**limits: float) -> TenantTable:
    return TenantTable({"acme": TenantLimits(**limits), "*": TenantLimits(weight=2.0)})


def test_a_tenant_over_its_requests_is_told_when_to_come_back() -> None:
    tenants = table(requests_per_s=4.0)
    for _ in range(4):
        tenants.check("acme", 1, 100, 10.0)
        tenants.reserve([asked("acme")], 100, 10.0)
    with pytest.raises(
        Busy, match="'acme' is over its requests_per_s of 4: 0 of 4 are left, and this takes 1"
    ) as caught:
        tenants.check("acme", 1, 100, 10.0)
    assert caught.value.retry_after_ms == 250
    tenants.check("acme", 1, 100, 10.25)


def test_a_tenant_over_its_tokens_is_refused_and_others_are_not() -> None:
    tenants = table(tokens_per_s=1000.0)
    tenants.check("acme", 1, 800, 0.0)
    tenants.reserve([asked("acme")], 800, 0.0)
    with pytest.raises(Busy, match="tokens_per_s of 1000: 200 of 1000 are left, and this takes 500"):
        tenants.check("acme", 1, 500, 0.0)
    tenants.check("acme", 1, 200, 0.0)
    tenants.check("other", 1, 1 << 30, 0.0)


def test_a_request_above_the_burst_passes_when_the_bucket_is_full_and_is_paid_off() -> None:
    tenants = table(tokens_per_s=100.0)
    tenants.check("acme", 1, 1000, 0.0)
    tenants.reserve([asked("acme")], 1000, 0.0)
    with pytest.raises(Busy) as caught:
        tenants.check("acme", 1, 1, 0.0)
    assert caught.value.retry_after_ms == 9010


def test_a_long_name_is_cut_in_the_message() -> None:
    tenants = TenantTable({"*": TenantLimits(requests_per_s=1.0, each=True)})
    tenants.reserve([asked("x" * 1000)], 1, 0.0)
    with pytest.raises(Busy) as caught:
        tenants.check("x" * 1000, 1, 1, 0.0)
    assert len(caught.value.message) < 200


# --- names --------------------------------------------------------------------------------------------------------


def visit(tenants: TenantTable, name: str, now: float, num_tokens: int = 1) -> None:
    tenants.reserve([asked(name)], num_tokens, now)


def test_unknown_names_share_one_bucket_and_the_name_of_the_entry_is_no_way_around_it() -> None:
    tenants = TenantTable({"*": TenantLimits(requests_per_s=1.0)})
    visit(tenants, "one", 0.0)
    for name in ("two", "", "*"):
        with pytest.raises(Busy, match=r"tenants without an entry are over their requests_per_s of 1"):
            tenants.check(name, 1, 1, 0.0)
    assert len(tenants._unnamed) == 0


def test_check_remembers_nothing() -> None:
    tenants = TenantTable({"*": TenantLimits(requests_per_s=1.0, each=True)})
    for number in range(10):
        tenants.check(f"visitor-{number}", 1, 1, 0.0)
    assert len(tenants._unnamed) == 0


@mock.patch.object(tenancy, "MAX_BUCKETS", 100)
def test_memory_is_bounded_and_shrinks_when_the_crowd_has_passed() -> None:
    tenants = TenantTable({"*": TenantLimits(requests_per_s=1.0, each=True)})
    for number in range(1000):
        visit(tenants, f"visitor-{number}", 0.0)
        assert len(tenants._unnamed) <= 100
    for number in range(200):
        visit(tenants, f"later-{number}", 10.0 + 2.0 * number)
    assert len(tenants._unnamed) <= 2


def test_an_unknown_tenant_in_debt_is_remembered_while_there_is_room() -> None:
    tenants = TenantTable({"*": TenantLimits(tokens_per_s=1.0, each=True)})
    visit(tenants, "debtor", 0.0, 1000)
    for number in range(100):
        visit(tenants, f"visitor-{number}", 1.0)
    with pytest.raises(Busy):
        tenants.check("debtor", 1, 1, 100.0)


@given(names=st.lists(st.sampled_from(["acme", "", "*", *(f"v{number}" for number in range(30))]), max_size=60))
@EXAMPLES
@mock.patch.object(tenancy, "MAX_BUCKETS", 4)
def test_no_crowd_of_names_makes_a_configured_tenant_forgotten(names: list[str]) -> None:
    limits = {"acme": TenantLimits(tokens_per_s=1.0), "*": TenantLimits(tokens_per_s=1.0, each=True)}
    tenants = TenantTable(limits)
    visit(tenants, "acme", 0.0, 1000)
    for name in names:
        visit(tenants, name, 0.0)
        assert len(tenants._unnamed) <= 4
    assert tokens_left(tenants, 0.0, "acme") == 1 - 1000 - names.count("acme")


def test_tenants_without_rates_leave_nothing_behind() -> None:
    tenants = TenantTable({"acme": TenantLimits(weight=2.0), "*": TenantLimits(each=True)})
    for name in ("acme", "one", "two"):
        visit(tenants, name, 0.0, 1000)
    assert len(tenants._unnamed) == 0


@mock.patch.object(tenancy, "MAX_BUCKETS", 1)
def test_giving_back_to_a_forgotten_tenant_leaves_it_full() -> None:
    tenants = TenantTable({"*": TenantLimits(tokens_per_s=10.0, each=True)})
    request = asked("one")
    tenants.reserve([request], 10, 0.0)
    visit(tenants, "two", 0.0)
    tenants.settle(request, 0.0)
    tenants.check("one", 1, 10, 0.0)
