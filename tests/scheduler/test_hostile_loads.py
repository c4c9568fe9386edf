"""Loads that once broke a promise, each as small as it can be."""

from __future__ import annotations

import pytest

from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.request import FinishReason, Priority, RequestState
from tidewheel.tenants import TenantLimits

CRITICAL, HIGH, _, LOW = Priority


@pytest.mark.parametrize("num_prompt_tokens", [10, 12, 14, 21])
@pytest.mark.parametrize("cache_aware_order", [True, False])
def test_a_prompt_that_was_cut_takes_back_no_more_than_it_misses(
    num_prompt_tokens: int, cache_aware_order: bool
) -> None:
    """Rows that leave for a second CRITICAL give their tokens back to the step, in which the first one was cut."""
    driver = SchedulerDriver(
        num_blocks=20,
        max_num_seqs=16,
        max_num_batched_tokens=16,
        watermark=0.15,
        cache_aware_order=cache_aware_order,
    )
    driver.add(make_request("cached", [8] * 13, max_tokens=1))
    driver.run()
    driver.add(make_request("first", [5] * 29, max_tokens=20, priority=CRITICAL, arrival_time=driver.now))
    for _ in range(3):
        driver.step()
    for number in range(6):
        prompt = [20 + number]
        driver.add(make_request(f"low{number}", prompt, max_tokens=30, priority=LOW, arrival_time=driver.now))
    driver.step()
    cut = make_request("cut", [6] * num_prompt_tokens, max_tokens=3, priority=CRITICAL, arrival_time=driver.now)
    driver.add(cut)
    driver.add(make_request("hit", [8] * 13, max_tokens=3, priority=CRITICAL, arrival_time=driver.now + 0.5))
    driver.run()
    assert cut.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_a_follower_that_has_started_keeps_its_place_without_its_leader() -> None:
    driver = SchedulerDriver(num_blocks=8, max_num_seqs=2, max_waiting_requests=2)
    leader = make_request("leader", [1] * 4, max_tokens=20)
    follower = make_request("follower", [1] * 4, max_tokens=20, leader=leader)
    driver.add_group([leader, follower])
    driver.cancel("leader")
    for _ in range(6):
        driver.step()
    driver.add(make_request("critical", [2] * 28, max_tokens=2, priority=CRITICAL, arrival_time=driver.now))
    driver.step()
    assert follower.state is RequestState.PREEMPTED
    for name in ("a", "b"):
        assert driver.add_group([make_request(name, [3] * 4, priority=HIGH, arrival_time=driver.now)]) == []
    driver.run()
    assert follower.finish_reason is not FinishReason.ERROR


def test_a_block_that_a_victim_would_have_grown_into_counts() -> None:
    driver = SchedulerDriver(num_blocks=20, block_size=1, max_num_batched_tokens=32, max_model_len=21)
    low = driver.add(make_request("low", [1] * 2, max_tokens=17, priority=LOW))
    for _ in range(2):
        driver.step()
    critical = driver.add(make_request("critical", [2] * 20, max_tokens=1, priority=CRITICAL))
    driver.schedule()
    assert critical.state is RequestState.RUNNING and low.num_preemptions == 1
    driver.apply()
    driver.run()


def test_a_tenant_whose_requests_wait_for_a_prefix_shuts_out_no_other() -> None:
    driver = SchedulerDriver(
        num_blocks=1000, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=4000, policy="fair",
        long_prefill_token_threshold=8, tenants={"a": TenantLimits(weight=8.0)},
    )  # fmt: skip
    driver.tick = 0.01
    driver.add(make_request("history", [3] * 200, max_tokens=400, tenant="b"))
    for _ in range(10):
        driver.step()
    driver.add(make_request("computing", [1] * 1000, max_tokens=1, tenant="a", arrival_time=driver.now))
    driver.step()
    driver.add(make_request("waiter", [*[1] * 1000, 2], max_tokens=1, tenant="a", arrival_time=driver.now))
    other = driver.add(make_request("other", [9] * 8, max_tokens=1, tenant="b", arrival_time=driver.now))
    driver.step()
    assert other.first_scheduled_time is not None
    assert driver.requests["waiter"].state is RequestState.WAITING
    driver.run()


def test_a_group_asks_for_room_to_grow_once() -> None:
    """Followers ask themselves, when they have forked."""
    driver = SchedulerDriver(
        num_blocks=500, max_num_seqs=32, max_model_len=2000, max_num_batched_tokens=64, admit_by_growth=True
    )
    for number in range(12):
        driver.add(make_request(f"old{number}", [number] * 4, max_tokens=300, arrival_time=driver.now))
    driver.run()
    driver.add(make_request("running", [30] * 4, max_tokens=1500, arrival_time=driver.now))
    driver.step()
    leader = make_request("leader", [31] * 4, max_tokens=1900, arrival_time=driver.now)
    group = [leader, *(make_request(f"f{n}", [31] * 4, max_tokens=1900, leader=leader) for n in range(15))]
    driver.add_group(group)
    driver.step()
    assert leader.state is RequestState.RUNNING
    for request in list(driver.requests.values()):
        if not request.is_finished:
            driver.cancel(request.request_id)
    driver.run()
