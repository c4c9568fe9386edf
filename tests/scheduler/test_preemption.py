"""Blocks run out: who leaves, who stays, and what comes of it."""

from __future__ import annotations

import pytest

from support.engine.fake_runner import naive_output
from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.request import Priority, Request, RequestState


def fill(driver: SchedulerDriver, **requests: Priority) -> list[Request]:
    """One request of two full blocks for each name; together they fill the pool."""
    added = [
        driver.add(make_request(name, prompt=[index] * 8, max_tokens=8, priority=priority, arrival_time=float(index)))
        for index, (name, priority) in enumerate(requests.items())
    ]
    driver.step()
    return added


def preempted(requests: list[Request]) -> list[str]:
    return [request.request_id for request in requests if request.state is RequestState.PREEMPTED]


def test_the_youngest_of_the_lowest_class_is_the_victim() -> None:
    driver = SchedulerDriver(num_blocks=8, block_size=4, max_num_batched_tokens=64)
    requests = fill(driver, a=Priority.NORMAL, b=Priority.LOW, c=Priority.LOW, d=Priority.NORMAL)
    driver.schedule()
    assert preempted(requests) == ["b", "c"]  # two blocks back, two more needed: a and d have theirs
    assert driver.scheduler.stats().num_preemptions == 2
    driver.apply()
    driver.run()


def test_under_fifo_the_youngest_is_the_victim_whatever_its_class() -> None:
    driver = SchedulerDriver(num_blocks=8, block_size=4, max_num_batched_tokens=64, policy="fifo")
    requests = fill(driver, a=Priority.LOW, b=Priority.NORMAL, c=Priority.NORMAL, d=Priority.CRITICAL)
    driver.schedule()
    assert preempted(requests) == ["c", "d"]
    driver.apply()
    driver.run()


def test_the_best_request_is_never_a_victim() -> None:
    driver = SchedulerDriver(num_blocks=6, block_size=2, max_num_batched_tokens=64)
    oldest = driver.add(make_request("oldest", prompt=[1], max_tokens=12, priority=Priority.HIGH))
    for number in range(3):
        driver.add(make_request(f"r{number}", prompt=[2 + number], max_tokens=12, arrival_time=1.0 + number))
    driver.run()
    assert oldest.num_preemptions == 0
    assert driver.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("max_inflight_steps", [1, 2])
def test_output_survives_preemption(enable_prefix_caching: bool, max_inflight_steps: int) -> None:
    driver = SchedulerDriver(
        num_blocks=12,
        block_size=2,
        max_num_seqs=6,
        enable_prefix_caching=enable_prefix_caching,
        max_inflight_steps=max_inflight_steps,
    )
    requests = [driver.add(make_request(f"r{n}", prompt=[n] * 4, max_tokens=16)) for n in range(12)]
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    assert all(request.output_token_ids == naive_output(request)[0] for request in requests)


def test_a_preempted_request_returns_with_its_output_before_its_class() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4, max_num_batched_tokens=64)
    first, second = fill(driver, a=Priority.NORMAL, b=Priority.NORMAL)
    driver.add(make_request("late", prompt=[9] * 4, max_tokens=2, arrival_time=9.0))
    driver.schedule()
    driver.apply()
    assert second.state is RequestState.PREEMPTED
    kept = list(second.output_token_ids)
    assert kept
    while second.state is RequestState.PREEMPTED:
        assert driver.requests["late"].state is RequestState.WAITING
        batch = driver.schedule()
        if second.state is RequestState.PREEMPTED:
            driver.apply()
    assert batch is not None
    new = next(new for new in batch.new_rows if new.request.request_id == "b")
    assert new.token_ids.tolist() == [*second.prompt_token_ids.tolist(), *kept]
    assert new.request.num_prompt_tokens == 8
    driver.apply()
    driver.run()
    assert first.num_preemptions == 0
    assert second.num_preemptions == 1


def test_what_a_victim_computed_is_found_again_if_nobody_took_it() -> None:
    driver = SchedulerDriver(num_blocks=5, block_size=4, max_num_batched_tokens=64)
    first = driver.add(make_request("a", prompt=[1] * 8, max_tokens=2))
    second = driver.add(make_request("b", prompt=[2] * 11, max_tokens=4, arrival_time=1.0))
    driver.step()
    driver.schedule()
    assert second.state is RequestState.PREEMPTED  # a takes one of its three blocks
    driver.apply()
    assert first.is_finished
    batch = driver.schedule()
    assert batch is not None
    assert batch.start_positions.tolist() == [8]
    driver.apply()
    driver.run()
    assert second.num_cached_tokens == 0  # counts at first admission
    assert second.num_reused_blocks == 2


def test_nobody_enters_in_a_step_that_preempts() -> None:
    driver = SchedulerDriver(num_blocks=6, block_size=4, max_num_batched_tokens=64)
    requests = fill(driver, a=Priority.NORMAL, b=Priority.NORMAL, c=Priority.LOW)
    driver.add(make_request("tiny", prompt=[9], max_tokens=2, priority=Priority.LOW, arrival_time=9.0))
    batch = driver.schedule()
    assert batch is not None
    assert preempted(requests) == ["c"]
    assert batch.new_rows == ()
    driver.apply()
    driver.run()


def test_an_admission_leaves_the_watermark_free_unless_nothing_runs() -> None:
    driver = SchedulerDriver(num_blocks=8, block_size=4, max_num_batched_tokens=64, watermark=0.5)
    driver.add(make_request("a", prompt=[1] * 24, max_tokens=2))
    driver.add(make_request("b", prompt=[2] * 4, max_tokens=2))
    driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (1, 1)
    driver.run()


def test_many_long_streams_in_a_small_pool_all_end() -> None:
    driver = SchedulerDriver(
        num_blocks=32, block_size=1, max_num_seqs=16, max_num_batched_tokens=32, max_waiting_requests=64
    )
    for number in range(64):
        driver.add(make_request(f"r{number}", prompt=[number % 7] * 3, max_tokens=20, arrival_time=float(number)))
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    assert max(request.num_preemptions for request in driver.requests.values()) < 64


def test_where_tenants_take_turns_no_critical_request_preempts_what_comes_before_it() -> None:
    """The victim would return first, take the blocks again, and so on for ever: so it once was."""
    driver = SchedulerDriver(
        policy="fair", max_inflight_steps=2, num_blocks=8, max_num_batched_tokens=8, max_num_seqs=3
    )
    driver.add(make_request("served", prompt=28, max_tokens=2, tenant="often"))
    shared = {"prompt": [9] * 24, "priority": Priority.HIGH, "tenant": "seldom"}
    rare = driver.add(make_request("rare", **shared))
    while rare.state is not RequestState.RUNNING:
        if len(driver.in_flight) == 2 or driver.schedule() is None:
            driver.apply()
    driver.add(make_request("waits for the blocks of rare", **shared))  # so the tenant keeps its turn
    driver.add(make_request("critical", prompt=[8] * 17, priority=Priority.CRITICAL, tenant="often"))
    driver.run()
    assert rare.num_preemptions == 0
