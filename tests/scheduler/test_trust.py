"""What a client may claim and what it pays: names, classes, rates, and the figures by tenant."""

from __future__ import annotations

import pytest
from msgspec import structs

from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.errors import Busy, DeadlineExceeded, InternalError, InvalidRequest
from tidewheel.request import FinishReason, Priority
from tidewheel.scheduler.admission import MAX_LABELS, OTHERS
from tidewheel.stats import TenantFigures
from tidewheel.tenants import TenantLimits

CRITICAL, HIGH, NORMAL, LOW = Priority


RATE = 0.001  # tokens a second: every request leaves a debt that can be read


def slow_driver(**changes: object) -> SchedulerDriver:
    """An engine where tenant `t` has a bucket of tokens."""
    return SchedulerDriver(
        **{
            "num_blocks": 400, "max_model_len": 1500, "max_num_batched_tokens": 2000, "predictor_prior_tokens": 10,
            "tenants": {"t": TenantLimits(tokens_per_s=RATE)},
        }
        | changes
    )  # fmt: skip


def num_paid(driver: SchedulerDriver, tenant: str = "t") -> int:
    """Tokens taken from the tenant's bucket, which was full at time 0 when the first request came."""
    try:
        driver.scheduler.admission._tenants.check(tenant, 0, 1, driver.now)
    except Busy as error:
        assert error.retry_after_ms is not None
        return round(RATE * (error.retry_after_ms / 1e3 + driver.now))
    return 0


# --- rates --------------------------------------------------------------------------------------------------------


def test_a_request_without_a_bound_of_its_own_reserves_what_is_predicted() -> None:
    driver = slow_driver()
    driver.add(make_request("a", prompt=20, max_tokens=1000, tenant="t"))
    assert num_paid(driver) == 20 + 10


@pytest.mark.parametrize("max_tokens", [3, 40])
def test_a_finished_request_has_paid_for_its_prompt_and_its_output(max_tokens: int) -> None:
    """Fewer tokens than predicted, and more."""
    driver = slow_driver()
    driver.add(make_request("a", prompt=200, max_tokens=max_tokens, tenant="t"))
    driver.run()
    assert num_paid(driver) == 200 + max_tokens


def test_a_request_that_a_stop_token_ends_pays_for_what_it_used() -> None:
    driver = slow_driver()
    request = driver.add(make_request("a", prompt=200, max_tokens=50, tenant="t", stop_token_ids=tuple(range(99))))
    driver.run()
    assert request.finish_reason is FinishReason.STOP and request.num_output_tokens == 1
    assert num_paid(driver) == 201


def test_each_sequence_of_a_group_reserves_and_pays() -> None:
    driver = slow_driver()
    leader = make_request("g0", prompt=200, max_tokens=30, tenant="t")
    driver.add_group([leader, make_request("g1", prompt=200, max_tokens=30, tenant="t", leader=leader)])
    assert num_paid(driver) == 2 * 210
    driver.run()
    assert num_paid(driver) == 2 * 230


def test_an_evicted_request_pays_nothing_and_may_come_again() -> None:
    driver = slow_driver(max_waiting_requests=1, tenants={"t": TenantLimits(tokens_per_s=RATE, requests_per_s=RATE)})
    driver.add(make_request("a", prompt=90, tenant="t", priority=LOW))
    assert [r.request_id for r in driver.add_group([make_request("x", priority=CRITICAL)])] == ["a"]
    assert num_paid(driver) == 0
    driver.cancel("x")
    driver.add(make_request("again", prompt=90, tenant="t"))
    driver.run()
    assert num_paid(driver) == 94


def test_a_request_cancelled_before_it_started_pays_nothing() -> None:
    driver = slow_driver(tenants={"t": TenantLimits(tokens_per_s=RATE, requests_per_s=RATE)})
    for name in "abcde":
        driver.add(make_request(name, prompt=90, tenant="t"))
        driver.cancel(name)
    assert num_paid(driver) == 0


def test_a_request_whose_deadline_passes_in_the_waiting_set_pays_nothing() -> None:
    driver = slow_driver(tenants={"t": TenantLimits(tokens_per_s=RATE, requests_per_s=RATE)})
    driver.add(make_request("late", prompt=90, tenant="t", deadline=0.5))
    driver.now += 0.6
    assert [request.request_id for request in driver.expire()] == ["late"]
    assert num_paid(driver) == 0
    driver.add(make_request("again", prompt=90, tenant="t"))


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR])
def test_a_request_that_ends_while_it_runs_pays_for_what_it_was_given(reason: FinishReason) -> None:
    driver = slow_driver()
    request = driver.add(make_request("a", prompt=200, max_tokens=60, tenant="t"))
    for _ in range(3):
        driver.step()
    driver.cancel("a", reason)
    assert request.num_output_tokens == 3
    assert num_paid(driver) == 203


def test_a_failure_of_the_engine_settles_everything() -> None:
    driver = slow_driver(max_num_seqs=1, tenants={"t": TenantLimits(tokens_per_s=1000.0)})
    for name in "ab":
        driver.add(make_request(name, prompt=300, max_tokens=60, tenant="t"))
    driver.step()
    driver.fail_all(InternalError("the device is lost"))
    bucket = driver.scheduler.admission._tenants
    bucket.check("t", 0, 1000 - 301, driver.now)
    assert all(request.is_finished for request in driver.requests.values())


def test_a_preempted_request_pays_once() -> None:
    driver = slow_driver(num_blocks=6, block_size=4, enable_prefix_caching=False, max_num_batched_tokens=64)
    driver.add(make_request("first", prompt=8, max_tokens=12))
    request = driver.add(make_request("a", prompt=8, max_tokens=12, tenant="t", priority=LOW))
    driver.run()
    assert request.num_preemptions > 0
    assert num_paid(driver) == 20


def test_a_refused_request_takes_nothing_from_the_bucket() -> None:
    driver = slow_driver(breaker_queue_time_s=1.0, max_waiting_requests=1)
    driver.add(make_request("a", tenant="other"))
    with pytest.raises(Busy, match="waiting set is full"):
        driver.add(make_request("b", tenant="t"))
    assert num_paid(driver) == 0


# --- who may ask for what -----------------------------------------------------------------------------------------


def test_five_thousand_names_share_the_bucket_of_the_unknown() -> None:
    driver = SchedulerDriver(max_waiting_requests=6000, tenants={"*": TenantLimits(requests_per_s=1.0)})
    driver.add(make_request("r0", tenant="name-0"))
    for number in range(1, 5000):
        with pytest.raises(Busy, match="tenants without an entry are over their requests_per_s of 1"):
            driver.add(make_request(f"r{number}", tenant=f"name-{number}"))


def test_unknown_tenants_may_have_a_bucket_each() -> None:
    driver = SchedulerDriver(tenants={"*": TenantLimits(requests_per_s=1.0, each=True)})
    for number in range(10):
        driver.add(make_request(f"r{number}", tenant=f"name-{number}"))
    with pytest.raises(Busy, match="tenant 'name-3' is over its requests_per_s"):
        driver.add(make_request("again", tenant="name-3"))


def test_a_class_above_the_cap_is_lowered_to_it() -> None:
    driver = SchedulerDriver(tenants={"t": TenantLimits(max_priority=3), "*": TenantLimits(max_priority="high")})  # type: ignore[arg-type]
    asked = {"t": [CRITICAL, HIGH, NORMAL, LOW], "unknown": [CRITICAL, HIGH, NORMAL, LOW]}
    granted = {
        tenant: [
            driver.add(make_request(f"{tenant}{priority}", tenant=tenant, priority=priority)).priority
            for priority in priorities
        ]
        for tenant, priorities in asked.items()
    }
    assert granted == {"t": [NORMAL, NORMAL, NORMAL, LOW], "unknown": [HIGH, HIGH, NORMAL, LOW]}
    assert driver.scheduler.stats().waiting_by_class == [0, 2, 4, 2]
    driver.run()


def test_a_lowered_request_is_served_evicts_and_ages_as_its_granted_class() -> None:
    driver = SchedulerDriver(max_num_seqs=1, max_waiting_requests=2, tenants={"t": TenantLimits(max_priority=3)})
    driver.add(make_request("low", priority=LOW))
    driver.add(make_request("normal"))
    claim = make_request("claim", tenant="t", priority=CRITICAL)
    assert [request.request_id for request in driver.add_group([claim])] == ["low"]
    assert claim.service_class is NORMAL
    with pytest.raises(Busy, match="waiting set is full"):
        driver.add(make_request("second", tenant="t", priority=CRITICAL))
    driver.run()
    assert driver.requests["normal"].first_scheduled_time < claim.first_scheduled_time


def test_every_class_may_be_asked_for_when_nothing_is_configured() -> None:
    driver = SchedulerDriver()
    for priority in Priority:
        assert driver.add(make_request(priority.name, priority=priority, tenant="anybody")).priority is priority
    driver.run()


def test_all_sequences_of_a_group_are_lowered() -> None:
    driver = SchedulerDriver(tenants={"*": TenantLimits(max_priority=4)})
    leader = make_request("g0", priority=CRITICAL)
    group = [leader, make_request("g1", priority=CRITICAL, leader=leader)]
    driver.add_group(group)
    assert [request.priority for request in group] == [LOW, LOW]
    driver.run()


# --- figures ------------------------------------------------------------------------------------------------------


def test_figures_by_tenant() -> None:
    driver = SchedulerDriver(max_num_seqs=1, max_waiting_requests=3, tenants={"t": TenantLimits(requests_per_s=2.0)})
    driver.add(make_request("a", prompt=5, max_tokens=3, tenant="t"))
    driver.add(make_request("b", prompt=6, max_tokens=4, tenant="t"))
    driver.add(make_request("c", prompt=7, max_tokens=2, tenant="invented"))
    with pytest.raises(Busy):
        driver.add(make_request("full", tenant="t"))
    with pytest.raises(InvalidRequest):
        driver.add(make_request("long", prompt=5, max_tokens=1000, tenant="another"))
    driver.run()
    waits = {name: driver.requests[name].first_scheduled_time or 0.0 for name in "abc"}
    assert driver.scheduler.stats().tenants == {
        "t": TenantFigures(
            num_requests=3, num_rejected=1, num_started=2, queue_seconds=waits["a"] + waits["b"],
            num_prompt_tokens=11, num_output_tokens=7,
        ),
        OTHERS: TenantFigures(
            num_requests=2, num_rejected=1, num_started=1, queue_seconds=waits["c"], num_prompt_tokens=7,
            num_output_tokens=2,
        ),
    }  # fmt: skip


def test_what_loses_its_place_or_its_deadline_in_the_waiting_set_counts_as_rejected() -> None:
    driver = SchedulerDriver(max_waiting_requests=1, tenants={"t": TenantLimits()})
    driver.add(make_request("evicted", tenant="t", priority=LOW))
    driver.add(make_request("x", priority=HIGH))
    driver.cancel("x")
    driver.add(make_request("late", tenant="t", deadline=0.5))
    driver.now = 1.0
    driver.expire()
    with pytest.raises(DeadlineExceeded):
        driver.add(make_request("hopeless", tenant="t", deadline=0.5))
    driver.add(make_request("cancelled", tenant="t"))
    driver.cancel("cancelled")
    figures = driver.scheduler.stats().tenants
    assert figures["t"] == TenantFigures(num_requests=4, num_rejected=3)
    assert figures[OTHERS] == TenantFigures(num_requests=1)


def test_labels_are_bounded_and_plain() -> None:
    tenants = {f"tenant-{number}": TenantLimits() for number in range(1000)}
    driver = SchedulerDriver(tenants={'odd "name"\n' + 200 * "x": TenantLimits(), "*": TenantLimits(), **tenants})
    for number in range(1, 4):
        driver.add(make_request(f"r{number}", tenant=f"tenant-{997 + number}"))
    figures = driver.scheduler.stats().tenants
    assert len(figures) == MAX_LABELS + 1
    assert next(iter(figures)).startswith("odd__name__xxx") and len(next(iter(figures))) <= 64
    assert figures[OTHERS].num_requests == 3
    driver.run()


def test_figures_are_a_snapshot() -> None:
    driver = SchedulerDriver()
    before = driver.scheduler.stats()
    driver.add(make_request("a"))
    assert before.tenants[OTHERS].num_requests == 0
    stats = driver.scheduler.stats()
    assert all(stats.waiting_by_class[i] - n == (i == 2) for i, n in enumerate(before.waiting_by_class))
    counted = driver.kv.stats
    for field, value in structs.asdict(stats).items():
        assert not isinstance(value, list | dict) or value is not getattr(counted, field), field
    assert stats.tenants[OTHERS] is not counted.tenants[OTHERS]
    driver.run()
