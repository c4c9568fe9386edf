"""Ageing and downgrades: how the class that a request is served in moves."""

from __future__ import annotations

import pytest

from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.request import Priority, Request
from tidewheel.tenants import TenantLimits

CRITICAL, HIGH, NORMAL, LOW = Priority


def busy_driver(**changes: object) -> SchedulerDriver:
    """One row, taken by a request that decodes for long."""
    driver = SchedulerDriver(max_num_seqs=1, num_blocks=64, **changes)
    driver.add(make_request("running", prompt=[9], max_tokens=200, priority=CRITICAL))
    driver.step()
    return driver


def waits(driver: SchedulerDriver, name: str, priority: Priority, **fields: object) -> Request:
    return driver.add(make_request(name, max_tokens=1, priority=priority, arrival_time=driver.now, **fields))


def test_one_class_at_a_time_and_to_high_at_most() -> None:
    assert [level.lifted() for level in Priority] == [CRITICAL, HIGH, HIGH, NORMAL]
    assert [level.dropped() for level in Priority] == [HIGH, NORMAL, LOW, LOW]


def test_low_stands_among_high_after_two_ageing_times() -> None:
    driver = busy_driver(ageing_s=10.0)
    low, normal, high = (waits(driver, level.name, level) for level in (LOW, NORMAL, HIGH))
    arrival = driver.now
    classes = {}
    while driver.now < arrival + 30.0:
        scheduled_at = driver.now + 1.0
        driver.step()
        classes[scheduled_at - arrival] = (low.service_class, normal.service_class, high.service_class)
    for age, levels in classes.items():
        lifts = int(age // 10.0)
        assert levels == ((LOW, NORMAL, HIGH, HIGH)[lifts], (NORMAL, HIGH, HIGH, HIGH)[lifts], HIGH)
    assert driver.scheduler.stats().num_aged == 3


@pytest.mark.parametrize("policy", ["priority", "sjf", "deadline", "density"])
def test_the_ageing_bound_holds_under_an_endless_stream_of_better_classes(policy: str) -> None:
    """A LOW request starts although NORMAL and HIGH ones keep coming, as many as the engine can serve."""
    driver = SchedulerDriver(max_num_seqs=1, ageing_s=10.0, policy=policy)
    low = driver.add(make_request("low", prompt=[5], max_tokens=8, priority=LOW))
    for number in range(60):
        level = (HIGH, NORMAL)[number % 2]
        driver.add(make_request(f"r{number}", prompt=[6], max_tokens=1, priority=level, arrival_time=driver.now))
        driver.step()
        if low.first_scheduled_time is not None:
            break
    assert low.first_scheduled_time is not None
    assert low.first_scheduled_time <= 2 * 10.0 + 8.0  # and what was ahead of it among HIGH by then
    driver.run()


def test_a_prompt_under_way_ages_behind_an_endless_stream_of_better_ones() -> None:
    """Each HIGH prompt takes the budget of a step; the LOW one has computed a part of its own before they came."""
    driver = SchedulerDriver(max_num_seqs=8, num_blocks=64, ageing_s=10.0, enable_prefix_caching=False)
    low = driver.add(make_request("low", prompt=40, max_tokens=1, priority=LOW))
    driver.step()
    for number in range(40):
        prompt = [number % 10] * 16
        driver.add(make_request(f"r{number}", prompt, max_tokens=1, priority=HIGH, arrival_time=driver.now))
        driver.step()
        if low.is_finished:
            break
    assert low.is_finished and low.service_class is HIGH
    driver.run()


def test_a_prompt_that_has_aged_leaves_the_requests_of_its_class_their_share() -> None:
    driver = SchedulerDriver(max_num_seqs=8, num_blocks=64, ageing_s=3.0, enable_prefix_caching=False)
    long = driver.add(make_request("long", prompt=160, max_tokens=1))
    for _ in range(3):
        driver.step()
    assert long.service_class is HIGH
    short = driver.add(make_request("short", prompt=4, max_tokens=1, arrival_time=driver.now))
    driver.step()
    assert short.is_finished and not long.is_finished
    driver.run()


def test_a_row_that_decodes_does_not_age() -> None:
    driver = SchedulerDriver(max_num_seqs=1, num_blocks=64, ageing_s=3.0)
    low = driver.add(make_request("low", max_tokens=30, priority=LOW))
    driver.run()
    assert low.service_class is LOW and driver.scheduler.stats().num_aged == 0


def test_a_follower_has_waited_as_long_as_the_leader_that_was_cancelled() -> None:
    driver = busy_driver(ageing_s=10.0)
    leader = make_request("leader", priority=LOW, arrival_time=driver.now)
    follower = make_request("follower", priority=LOW, arrival_time=driver.now, leader=leader)
    arrival = driver.now
    driver.add_group([leader, follower])
    for _ in range(3):
        driver.step()
    driver.cancel("leader")
    while driver.now < arrival + 11.0:
        driver.step()
    assert follower.service_class is NORMAL
    driver.run()


@pytest.mark.parametrize("level", [LOW, HIGH, CRITICAL])
def test_a_long_job_does_not_starve_behind_short_ones_of_its_class(level: Priority) -> None:
    """Under `sjf` a stream of shorter jobs overtakes it, until it has waited `ageing_s` in the best class it can."""
    driver = SchedulerDriver(max_num_seqs=1, num_blocks=64, ageing_s=10.0, policy="sjf", predictor_prior_tokens=1000)
    long = driver.add(make_request("long", prompt=[5], max_tokens=30, priority=level))
    for number in range(60):
        arrival = driver.now
        driver.add(
            make_request(f"r{number}", prompt=[6], max_tokens=1, priority=min(level, HIGH), arrival_time=arrival)
        )
        driver.step()
        if long.first_scheduled_time is not None:
            break
    assert long.first_scheduled_time is not None
    assert long.first_scheduled_time == pytest.approx((31.0 if level is LOW else 11.0), abs=1.0)
    driver.run()


def test_a_lifted_request_never_overtakes_a_critical_one() -> None:
    driver = busy_driver(ageing_s=1.0)
    low = waits(driver, "low", LOW)
    for _ in range(10):
        driver.step()
    critical = waits(driver, "critical", CRITICAL)
    driver.run()
    assert low.service_class is HIGH
    assert critical.first_scheduled_time is not None and low.first_scheduled_time is not None
    assert critical.first_scheduled_time < low.first_scheduled_time


def test_a_passed_soft_deadline_drops_a_class_also_of_a_running_request() -> None:
    driver = SchedulerDriver(max_num_seqs=1, num_blocks=64, ageing_s=1000.0)
    running = driver.add(make_request("running", max_tokens=100, priority=HIGH, soft_deadline=19.5))
    waiting = driver.add(make_request("waiting", max_tokens=1, priority=NORMAL, soft_deadline=19.5))
    lowest = driver.add(make_request("lowest", max_tokens=1, priority=LOW, soft_deadline=19.5))
    while driver.now < 30.0:
        assert (running.service_class is HIGH) == (driver.now < 21.0)
        driver.step()
    assert (running.service_class, waiting.service_class, lowest.service_class) == (NORMAL, LOW, LOW)
    assert driver.scheduler.stats().num_downgraded_deadline == 2
    driver.run()


def test_a_tenant_over_its_quota_drops_a_class_on_arrival() -> None:
    driver = SchedulerDriver(block_size=4, tenants={"big": TenantLimits(max_blocks=3)})
    first = driver.add(make_request("first", prompt=8, max_tokens=8, tenant="big"))
    driver.step()
    second = driver.add(make_request("second", prompt=8, max_tokens=8, tenant="big"))
    other = driver.add(make_request("other", prompt=8, max_tokens=8, tenant="small"))
    assert (first.service_class, second.service_class, other.service_class) == (NORMAL, LOW, NORMAL)
    assert driver.scheduler.stats().num_downgraded_quota == 1
    driver.run()


def test_a_burst_of_one_tenant_drops_when_its_turn_comes_and_lets_others_pass() -> None:
    driver = SchedulerDriver(block_size=4, max_num_seqs=2, tenants={"*": TenantLimits(max_blocks=3)})
    burst = [
        driver.add(make_request(f"b{number}", prompt=[number] * 8, max_tokens=2, tenant="burst"))
        for number in range(3)
    ]
    other = driver.add(make_request("other", prompt=[7] * 8, max_tokens=2, tenant="other", arrival_time=1.0))
    driver.step()
    assert burst[0].service_class is NORMAL and burst[1].service_class is LOW
    assert other.first_scheduled_time is not None and burst[1].first_scheduled_time is None
    driver.run()


def test_a_request_drops_once_for_its_quota() -> None:
    driver = busy_driver(ageing_s=1000.0, tenants={"t": TenantLimits(max_blocks=1)})
    request = waits(driver, "a", HIGH, prompt=8, tenant="t")
    for _ in range(5):
        driver.step()
    assert request.service_class is NORMAL
    driver.run()
    assert driver.scheduler.stats().num_downgraded_quota == 1
