"""Prefixes that requests share: computed once, and the order in which the cache is used."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.engine.fake_runner import naive_output
from support.scheduler.budget_checks import check_shares, scheduled_tokens
from support.scheduler.invariants import check_invariants
from support.scheduler.scheduler_model import Model
from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.request import Priority, Request, RequestState

HIGH, NORMAL = Priority.HIGH, Priority.NORMAL
RUNNING = RequestState.RUNNING
SHARED = [number % 31 for number in range(64)]


def burst(driver: SchedulerDriver, number: int, *, shared: Sequence[int] = SHARED, **fields: object) -> list[Request]:
    """Requests that come together, with a common prefix and three tokens each of their own; they sample one."""
    fields = {"max_tokens": 1, **fields}
    return [driver.add(make_request(f"r{n}", [*shared, 38, n, n], **fields)) for n in range(number)]


def num_computed(driver: SchedulerDriver) -> int:
    """Prompt tokens, where every request samples one token."""
    return driver.scheduler.stats().num_scheduled_tokens


def check_tokens(requests: Sequence[Request]) -> None:
    for request in requests:
        assert (request.output_token_ids, request.finish_reason) == naive_output(request)


@pytest.mark.parametrize("max_inflight_steps", [1, 2])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("budget", [24, 64, 512])
def test_requests_that_come_together_compute_their_common_prefix_once(
    max_inflight_steps: int, block_size: int, budget: int
) -> None:
    driver = SchedulerDriver(
        num_blocks=1024 // block_size,
        block_size=block_size,
        max_num_seqs=16,
        max_num_batched_tokens=budget,
        max_inflight_steps=max_inflight_steps,
    )
    requests = burst(driver, 8)
    driver.run()
    check_tokens(requests)
    assert num_computed(driver) <= len(SHARED) + 8 * 3 + 8 * block_size


def test_nothing_is_put_off_without_prefix_caching() -> None:
    driver = SchedulerDriver(
        num_blocks=256, max_num_seqs=16, max_num_batched_tokens=1024, enable_prefix_caching=False
    )
    requests = burst(driver, 8)
    driver.step()
    assert all(request.is_finished for request in requests)


def test_requests_of_other_tenants_and_salts_do_not_wait_for_each_other() -> None:
    driver = SchedulerDriver(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=1024)
    for n, fields in enumerate([{"tenant": "a"}, {"tenant": "b"}, {"cache_salt": "x"}, {}]):
        driver.add(make_request(f"r{n}", [*SHARED, n], max_tokens=1, **fields))
    driver.step()
    assert driver.ended.keys() == {"r0", "r1", "r2", "r3"}


def test_a_request_behind_a_burst_does_not_wait_for_its_prefix() -> None:
    driver = SchedulerDriver(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=512)
    burst(driver, 8)
    other = driver.add(make_request("other", [35] * 8, max_tokens=4, arrival_time=1.0))
    driver.step()
    assert other.first_scheduled_time is not None
    driver.run()


@pytest.mark.parametrize("max_inflight_steps", [1, 2])
@pytest.mark.parametrize("mishap", ["cancelled", "failed", "preempted"])
def test_a_burst_goes_on_without_the_request_that_computes_its_prefix(mishap: str, max_inflight_steps: int) -> None:
    driver = SchedulerDriver(
        num_blocks=256, max_num_seqs=16, max_num_batched_tokens=24, max_inflight_steps=max_inflight_steps
    )
    requests = burst(driver, 8, max_tokens=3)
    driver.step()
    (first,) = [request for request in requests if request.state is RUNNING]
    match mishap:
        case "cancelled":
            driver.cancel(first.request_id)
        case "failed":
            driver.runner.not_finite.add(first.request_id)
        case "preempted":
            driver.scheduler._state.preempt(first.row, driver.now)
    driver.run()
    check_tokens([request for request in requests if request is not first or mishap == "preempted"])


def test_a_burst_that_ends_at_once_leaves_nothing_behind() -> None:
    driver = SchedulerDriver(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=24)
    burst(driver, 8)
    driver.step()
    for number in range(8):
        driver.cancel(f"r{number}")
        check_invariants(driver.scheduler)
    driver.run()


def test_a_small_common_part_of_a_long_prompt_is_not_waited_for() -> None:
    """The long prompt takes 32 steps; the short one shares 16 tokens with it and has 20 of its own."""
    driver = SchedulerDriver(
        num_blocks=1024, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=4096, max_waiting_tokens=1 << 16
    )
    long = driver.add(make_request("long", [*SHARED[:16], *[32, 33] * 1000], max_tokens=1))
    driver.step()
    short = driver.add(make_request("short", [*SHARED[:16], *[34] * 20], max_tokens=1, arrival_time=1.0))
    for _ in range(3):
        driver.step()
    assert short.is_finished and long.state is RUNNING
    driver.run()


# --- the order of service -----------------------------------------------------------------------------------------


def one_at_a_time(**changes: object) -> SchedulerDriver:
    """A pool that still has the blocks of `SHARED`, and one row, which is taken."""
    driver = SchedulerDriver(num_blocks=256, max_num_seqs=1, max_num_batched_tokens=512, **changes)
    driver.add(make_request("before", [*SHARED, 1], max_tokens=1))
    driver.run()
    driver.add(make_request("busy", [36] * 3, max_tokens=4))
    driver.step()
    return driver


def add_waiting(driver: SchedulerDriver, name: str, num_cached: int, **fields: object) -> Request:
    """A prompt of 65 tokens, of which the first `num_cached` are in the cache."""
    prompt = [*SHARED[:num_cached], *[37] * (65 - num_cached)]
    return driver.add(make_request(name, prompt, max_tokens=1, arrival_time=driver.now, **fields))


def order_of_starts(driver: SchedulerDriver) -> list[str]:
    """Ids of those that wait now, in the order in which they start."""
    waiting = [request for request in driver.requests.values() if request.first_scheduled_time is None]
    driver.run()
    waiting.sort(key=lambda request: request.first_scheduled_time or 0.0)
    return [request.request_id for request in waiting]


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_the_longest_cached_prefix_of_a_class_enters_first(policy: str) -> None:
    driver = one_at_a_time(ageing_s=1000.0, policy=policy)
    for name, num_cached in (("cold", 0), ("some", 16), ("most", 64), ("half", 32)):
        add_waiting(driver, name, num_cached)
    assert order_of_starts(driver) == ["most", "half", "some", "cold"]


def test_equal_prefixes_enter_in_the_order_of_arrival() -> None:
    driver = one_at_a_time(ageing_s=1000.0)
    for number in range(4):
        add_waiting(driver, f"r{number}", 32)
    assert order_of_starts(driver) == ["r0", "r1", "r2", "r3"]


def test_a_cached_prefix_overtakes_no_better_class() -> None:
    driver = one_at_a_time(ageing_s=1000.0)
    add_waiting(driver, "warm", 64)
    add_waiting(driver, "cold but high", 0, priority=HIGH)
    assert order_of_starts(driver) == ["cold but high", "warm"]


def test_under_fifo_the_cache_changes_nothing() -> None:
    driver = one_at_a_time(policy="fifo")
    for name, num_cached in (("cold", 0), ("warm", 64)):
        add_waiting(driver, name, num_cached)
    assert order_of_starts(driver) == ["cold", "warm"]


@pytest.mark.parametrize("priority", [HIGH, NORMAL])
def test_a_request_that_has_waited_for_the_ageing_time_is_not_overtaken_for_the_cache(priority: Priority) -> None:
    """A new request with the whole prefix in the cache comes in every step."""
    driver = one_at_a_time(ageing_s=15.0)
    cold = add_waiting(driver, "cold", 0, priority=priority)
    begin = driver.now
    for number in range(40):
        add_waiting(driver, f"warm{number}", 64, priority=priority)
        driver.step()
        if cold.first_scheduled_time is not None:
            break
    assert cold.first_scheduled_time is not None
    assert cold.first_scheduled_time <= begin + 15.0 + 2.0, "one step may be under way"
    driver.run()


@pytest.mark.parametrize("num_cached", [0, 64])
def test_a_request_that_has_run_is_not_overtaken_and_overtakes_nobody(num_cached: int) -> None:
    driver = SchedulerDriver(num_blocks=256, max_num_seqs=1, max_num_batched_tokens=512, ageing_s=1000.0)
    driver.add(make_request("before", [*SHARED, 1], max_tokens=1))
    driver.run()
    prompt = [*SHARED[:num_cached], *[37] * (65 - num_cached)]
    again = driver.add(make_request("again", prompt, max_tokens=4, arrival_time=driver.now))
    driver.step()
    for name, others, arrival in (("cold", [36] * 65, -1.0), ("warm", [*SHARED, 2], 1.0)):
        driver.add(make_request(name, others, max_tokens=1, arrival_time=again.arrival_time + arrival))
    driver.scheduler._state.preempt(again.row, driver.now)
    assert order_of_entries(driver) == ["cold", "again", "warm"]


def order_of_entries(driver: SchedulerDriver) -> list[str]:
    entries: list[str] = []
    while (batch := driver.schedule()) is not None:
        entries += [entry.request.request_id for entry in batch.new_rows]
        driver.apply()
    return entries


@pytest.mark.parametrize(("own", "fits"), [(2, True), (60, False)])
def test_a_prompt_under_way_precedes_those_that_it_and_a_later_one_have_overtaken(own: int, fits: bool) -> None:
    """`warm` and `hot` overtake `cold`, but `hot` does not overtake `warm`, whether it fits or not."""
    driver = SchedulerDriver(num_blocks=20, max_num_seqs=4, max_num_batched_tokens=8, ageing_s=1000.0)
    driver.add(make_request("before", [*SHARED[:16], 1], max_tokens=1))
    driver.run()
    model = Model(driver.config)
    prompts = {"cold": [36] * 30, "warm": [*SHARED[:16], *[37] * 13], "hot": [*SHARED[:16], *[38] * own]}
    requests = {name: make_request(name, tokens, arrival_time=driver.now) for name, tokens in prompts.items()}
    for name in ("cold", "warm"):
        model.add(driver.add(requests[name]))
    driver.step()
    assert [name for name, request in requests.items() if request.state is RUNNING] == ["warm"]
    model.add(driver.add(requests["hot"]))
    batch = driver.schedule()
    assert batch is not None
    names = {request.row: name for name, request in requests.items()}
    counts = {names[row]: count for row, count in scheduled_tokens(batch).items()}
    assert counts == ({"warm": 5, "hot": 2, "cold": 1} if fits else {"warm": 5, "cold": 3})
    waiting = [] if fits else [requests["hot"]]
    check_shares(driver, batch, model, 0, waiting, {"cold", "hot"})
    with pytest.raises(AssertionError):  # if `hot` might not overtake
        check_shares(driver, batch, model, 0, waiting, {"cold"})
    driver.apply()
    driver.run()
