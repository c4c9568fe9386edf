"""A full waiting set: who gives way to whom, and groups that get in whole or not at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.errors import Busy, InvalidRequest, PromptTooLarge
from tidewheel.request import FinishReason, Priority, Request
from tidewheel.scheduler.breaker import BreakerState
from tidewheel.scheduler.policy import POLICIES
from tidewheel.tenants import TenantLimits

CRITICAL, HIGH, NORMAL, LOW = Priority
PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"


def full_driver(*levels: Priority, **changes: object) -> SchedulerDriver:
    driver = SchedulerDriver(max_waiting_requests=len(levels), **changes)
    for number, level in enumerate(levels):
        driver.add(make_request(f"r{number}", priority=level, arrival_time=float(number)))
    return driver


def evicted(driver: SchedulerDriver, *requests: Request) -> list[str]:
    return [request.request_id for request in driver.add_group(list(requests))]


def test_the_newest_of_the_lowest_class_gives_way() -> None:
    driver = full_driver(LOW, NORMAL, LOW, HIGH)
    assert evicted(driver, make_request("x", priority=CRITICAL)) == ["r2"]
    victim = driver.requests["r2"]
    assert isinstance(victim.error, Busy) and victim.error.retry_after_ms
    assert "4 of 4 requests" in str(victim.error)
    assert "class CRITICAL took the place of this one, of class LOW" in str(victim.error)
    assert evicted(driver, make_request("y", priority=CRITICAL)) == ["r0"]
    assert evicted(driver, make_request("z", priority=CRITICAL)) == ["r1"]
    stats = driver.scheduler.stats()
    assert stats.evicted_by_class == [0, 0, 1, 2]
    driver.run()


def test_nobody_gives_way_to_his_own_class() -> None:
    driver = full_driver(NORMAL, HIGH)
    with pytest.raises(Busy, match="2 of 2 requests"):
        driver.add(make_request("x", priority=NORMAL))
    assert sum(driver.scheduler.stats().evicted_by_class) == 0
    driver.run()


def test_who_was_lifted_does_not_give_way_to_the_class_it_stands_in() -> None:
    driver = SchedulerDriver(max_num_seqs=1, num_blocks=64, max_waiting_requests=1, ageing_s=1.0)
    driver.add(make_request("running", max_tokens=100, priority=CRITICAL))
    driver.step()
    low = driver.add(make_request("low", priority=LOW))
    for _ in range(4):
        driver.step()
    assert low.service_class is HIGH
    with pytest.raises(Busy):
        driver.add(make_request("high", priority=HIGH))
    assert evicted(driver, make_request("critical", priority=CRITICAL)) == ["low"]
    driver.run()


def test_as_many_give_way_as_the_tokens_ask_for() -> None:
    driver = SchedulerDriver(max_waiting_tokens=30)
    for number in range(3):
        driver.add(make_request(f"r{number}", prompt=10, priority=LOW, arrival_time=float(number)))
    assert evicted(driver, make_request("x", prompt=15, priority=HIGH)) == ["r2", "r1"]
    with pytest.raises(Busy, match="25 of 30 tokens, and this prompt has 16"):
        driver.add(make_request("y", prompt=16, priority=HIGH))
    assert sum(driver.scheduler.stats().evicted_by_class) == 2
    driver.run()


def test_who_has_started_does_not_give_way() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4, max_num_batched_tokens=64, max_waiting_requests=2)
    for name in "ab":
        driver.add(make_request(name, prompt=[ord(name)] * 8, max_tokens=4, priority=LOW))
    driver.step()
    driver.step()
    assert driver.requests["b"].num_preemptions == 1
    for name in "cd":
        driver.add(make_request(name, prompt=2, priority=NORMAL))
    with pytest.raises(Busy):
        driver.add(make_request("e", prompt=2, priority=NORMAL))
    assert not driver.requests["b"].is_finished
    driver.run()


def group(count: int, **fields: object) -> list[Request]:
    leader = make_request("g0", **fields)
    return [leader, *(make_request(f"g{number}", leader=leader, **fields) for number in range(1, count))]


def test_a_group_counts_as_many_requests_and_prompts() -> None:
    driver = SchedulerDriver(max_waiting_requests=4, max_waiting_tokens=100)
    with pytest.raises(InvalidRequest, match="n is 5: at most 4 requests may wait"):
        driver.add_group(group(5))
    with pytest.raises(PromptTooLarge, match="prompt of 26 tokens, 4 times: at most 100 tokens"):
        driver.add_group(group(4, prompt=26))
    driver.add_group(group(3, prompt=20))
    assert driver.scheduler.stats().num_waiting_tokens == 60
    with pytest.raises(Busy, match="3 of 4 requests, and this one asks for 2 sequences"):
        driver.add_group([make_request("x"), make_request("y")])
    assert driver.scheduler.num_waiting == 3
    driver.run()


def test_a_group_evicts_for_all_of_its_sequences_or_for_none() -> None:
    driver = full_driver(LOW, HIGH, LOW)
    with pytest.raises(Busy):
        driver.add_group(group(3, priority=NORMAL))
    assert sum(driver.scheduler.stats().evicted_by_class) == 0
    assert evicted(driver, *group(2, priority=NORMAL)) == ["r2", "r0"]
    driver.run()


def test_a_tenant_over_its_rate_is_refused_and_others_are_not() -> None:
    driver = SchedulerDriver(tenants={"slow": TenantLimits(tokens_per_s=20.0)})
    driver.add(make_request("a", prompt=10, max_tokens=10, tenant="slow"))
    before = driver.scheduler.stats()
    with pytest.raises(Busy, match="tokens_per_s of 20") as caught:
        driver.add(make_request("b", prompt=10, max_tokens=10, tenant="slow"))
    assert caught.value.retry_after_ms == 1000
    assert replace(driver.scheduler.stats(), tenants=before.tenants) == replace(before, num_rate_limited=1)
    driver.add(make_request("c", prompt=10, max_tokens=10, tenant="other"))
    driver.now += 1.0
    driver.add(make_request("b", prompt=10, max_tokens=10, tenant="slow"))
    driver.run()


def test_a_refused_request_costs_its_tenant_nothing() -> None:
    driver = SchedulerDriver(max_waiting_requests=1, tenants={"slow": TenantLimits(requests_per_s=2.0)})
    driver.add(make_request("a"))
    for _ in range(10):
        with pytest.raises(Busy, match="waiting set is full"):
            driver.add(make_request("b", tenant="slow"))
    driver.cancel("a")
    driver.add(make_request("b", tenant="slow"))
    driver.run()


def test_the_breaker_sheds_low_when_requests_wait_too_long() -> None:
    driver = SchedulerDriver(max_num_seqs=1, breaker_queue_time_s=2.0, ageing_s=1000.0)
    for number in range(40):
        driver.add(make_request(f"r{number}", prompt=1, max_tokens=1, arrival_time=driver.now))
    while driver.scheduler.stats().breaker_state == BreakerState.CLOSED:
        assert driver.step() is not None
    with pytest.raises(Busy, match="class LOW are refused, queue time"):
        driver.add(make_request("low", priority=LOW, arrival_time=driver.now))
    driver.add(make_request("critical", priority=CRITICAL, arrival_time=driver.now))
    assert driver.scheduler.stats().num_shed_by_class == [0, 0, 0, 1]
    driver.run()


def test_the_breaker_counts_errors_of_ours_only() -> None:
    driver = SchedulerDriver(max_num_seqs=8, breaker_error_rate=0.5, max_num_batched_tokens=64)
    for number in range(20):
        request = driver.add(make_request(f"late{number}", max_tokens=50, deadline=driver.now + 2.0))
        driver.cancel(request.request_id, FinishReason.CANCELLED)
    for number in range(5):
        driver.add(make_request(f"expires{number}", max_tokens=50, deadline=driver.now + 2.0))
    driver.run()
    assert driver.scheduler.stats().breaker_state == BreakerState.CLOSED
    for number in range(25):
        driver.runner.not_finite.add(f"bad{number}")
        driver.add(make_request(f"bad{number}", priority=CRITICAL))
        driver.run()
    assert driver.scheduler.stats().breaker_state == BreakerState.OPEN


def crowd_of(*tenants: str, **changes: object) -> SchedulerDriver:
    driver = SchedulerDriver(
        policy="fair", max_num_seqs=1, num_blocks=64, max_waiting_requests=len(tenants), **changes
    )
    for number, tenant in enumerate(tenants):
        driver.add(make_request(f"r{number}", tenant=tenant, arrival_time=float(number)))
    return driver


def test_under_fair_a_flood_gives_way_to_who_has_fewer_waiting() -> None:
    driver = crowd_of("big", "big", "big", "big")
    assert evicted(driver, make_request("x", tenant="small")) == ["r3"]
    assert "a tenant with fewer waiting for its weight took the place" in str(driver.requests["r3"].error)
    assert evicted(driver, make_request("y", tenant="small")) == ["r2"]
    for tenant in ("small", "big"):  # two each: neither has more than it would leave the other
        with pytest.raises(Busy, match="4 of 4 requests"):
            driver.add(make_request("z", tenant=tenant))
    driver.run()


def test_under_fair_a_class_takes_places_of_its_own_tenant_alone() -> None:
    driver = SchedulerDriver(policy="fair", max_num_seqs=1, num_blocks=64, max_waiting_requests=2)
    driver.add(make_request("a", tenant="a", priority=LOW))
    driver.add(make_request("b", tenant="b", priority=LOW))
    assert evicted(driver, make_request("x", tenant="a", priority=HIGH)) == ["a"]
    with pytest.raises(Busy):
        driver.add(make_request("y", tenant="a", priority=HIGH))
    driver.run()


def test_under_fair_weight_is_the_measure() -> None:
    driver = crowd_of("heavy", "heavy", "light", "light", tenants={"heavy": TenantLimits(weight=4.0)})
    with pytest.raises(Busy):
        driver.add(make_request("x", tenant="light"))
    assert evicted(driver, make_request("y", tenant="heavy")) == ["r3"]
    driver.run()


def test_under_fair_a_group_that_displaced_one_of_its_own_may_still_take_from_a_bigger_crowd() -> None:
    driver = SchedulerDriver(policy="fair", max_num_seqs=1, num_blocks=64, max_waiting_requests=4)
    driver.add(make_request("a0", tenant="a", priority=LOW))
    for number in range(3):
        driver.add(make_request(f"b{number}", tenant="b", arrival_time=float(number)))
    leader = make_request("x", tenant="a", priority=CRITICAL)
    assert evicted(driver, leader, make_request("y", tenant="a", priority=CRITICAL, leader=leader)) == ["a0", "b2"]
    driver.run()


# What waits, as tenant and class; the newcomer; limits of tenants. In the order of the table's rows.
AT_THE_BOUND = {
    "a lower class, the same tenant": ([("a", LOW)], ("a", HIGH), {}),
    "a lower class, another tenant": ([("b", LOW)], ("a", HIGH), {}),
    "a lower class, another tenant that may not ask for the newcomer's class": (
        [("b", LOW)], ("a", HIGH), {"b": TenantLimits(max_priority=3)},
    ),
    "the same class, a tenant with more waiting requests per weight": (
        [("b", NORMAL)] * 2, ("a", NORMAL), {"a": TenantLimits(weight=4.0)},
    ),
    "a higher class, a tenant with more waiting requests per weight": ([("b", HIGH)] * 2, ("a", NORMAL), {}),
    "a class that the newcomer's tenant may not ask for": (
        [("b", HIGH)] * 2, ("a", NORMAL), {"a": TenantLimits(max_priority=3)},
    ),
    "the same class and tenant, later in the order of the policy": ([("a", NORMAL)], ("a", NORMAL), {}),
}  # fmt: skip


def test_the_documentation_has_a_row_for_each_case() -> None:
    assert list(table_of_the_page()) == list(AT_THE_BOUND)


@pytest.mark.parametrize("case", AT_THE_BOUND)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_documentation_says_what_gives_way(policy: str, case: str) -> None:
    waiting, (tenant, level), tenants = AT_THE_BOUND[case]
    driver = SchedulerDriver(
        policy=policy, max_num_seqs=1, num_blocks=64, max_waiting_requests=len(waiting), tenants=tenants
    )
    for number, (name, priority) in enumerate(waiting):
        driver.add(make_request(f"r{number}", tenant=name, priority=priority, max_tokens=8, deadline=90.0))
    newcomer = make_request("x", tenant=tenant, priority=level, prompt=2, max_tokens=2, deadline=80.0)
    if table_of_the_page()[case][policy]:
        assert evicted(driver, newcomer) == [f"r{len(waiting) - 1}"]
    else:
        with pytest.raises(Busy, match="waiting set is full"):
            driver.add(newcomer)
    driver.run()


def table_of_the_page() -> dict[str, dict[str, bool]]:
    """Return for each row whether such a request gives way, by policy."""
    part = PAGE.read_text().split("### At a full waiting set\n")[1].split("\n## ")[0]
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*", part, re.M)
    )
    names = [name.strip("`") for name in header[1:]]
    return {row[0]: {name: cell == "yes" for name, cell in zip(names, row[1:], strict=True)} for row in rows}


def waiting_of(driver: SchedulerDriver, tenant: str) -> int:
    return sum(request.tenant == tenant and not request.is_finished for request in driver.requests.values())


def offer(driver: SchedulerDriver, tenant: str, count: int, level: Priority) -> int:
    """Return how many requests were refused at once."""
    num_refused = 0
    for number in range(count):
        try:
            driver.add(make_request(f"{tenant}{number}", tenant=tenant, priority=level))
        except Busy:
            num_refused += 1
    return num_refused


def test_under_fair_the_places_of_a_full_waiting_set_are_shared_by_weight() -> None:
    driver = SchedulerDriver(
        policy="fair", max_waiting_requests=20, max_num_seqs=1, tenants={"paying": TenantLimits(weight=4.0)}
    )
    assert offer(driver, "free", 40, NORMAL) == 20
    assert offer(driver, "paying", 40, HIGH) == 24
    assert (waiting_of(driver, "paying"), waiting_of(driver, "free")) == (16, 4)
    with pytest.raises(Busy, match=r"20 of 20 requests \(16 of its own tenant\)"):
        driver.add(make_request("x", tenant="paying"))
    driver.run()


def test_under_fair_a_class_that_is_denied_to_others_has_their_places_and_keeps_them() -> None:
    driver = SchedulerDriver(
        policy="fair",
        max_waiting_requests=20,
        max_num_seqs=1,
        tenants={"paying": TenantLimits(weight=4.0), "*": TenantLimits(max_priority=3)},
    )
    offer(driver, "free", 40, NORMAL)
    assert offer(driver, "paying", 20, HIGH) == 0
    assert (waiting_of(driver, "paying"), waiting_of(driver, "free")) == (20, 0)
    assert offer(driver, "another", 3, NORMAL) == 3
    assert waiting_of(driver, "paying") == 20
    driver.run()
