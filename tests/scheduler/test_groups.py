"""Sequences that share a prompt: they wait for their leader, and fork what it has computed."""

from __future__ import annotations

import pytest

from support.engine.fake_runner import naive_output
from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.request import Priority, Request, RequestState


def group(count: int, **fields: object) -> list[Request]:
    leader = make_request("r0", **fields)
    return [leader, *(make_request(f"r{number}", leader=leader, **fields) for number in range(1, count))]


def states(driver: SchedulerDriver) -> list[RequestState]:
    return [request.state for request in driver.requests.values()]


WAITING, RUNNING = RequestState.WAITING, RequestState.RUNNING


@pytest.mark.parametrize("max_inflight_steps", [1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_prompt_is_computed_once(max_inflight_steps: int, enable_prefix_caching: bool) -> None:
    driver = SchedulerDriver(
        num_blocks=64,
        max_num_batched_tokens=64,
        max_inflight_steps=max_inflight_steps,
        enable_prefix_caching=enable_prefix_caching,
    )
    requests = group(4, prompt=14, max_tokens=6)
    driver.add_group(requests)
    driver.run()
    assert all(request.output_token_ids == naive_output(request)[0] for request in requests)
    assert [request.num_cached_tokens for request in requests] == [0, 13, 13, 13]
    assert driver.scheduler.stats().num_scheduled_tokens == 14 + 3 + 4 * 5


def test_the_others_wait_until_the_leader_has_computed_the_prompt() -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_batched_tokens=4)
    driver.add_group(group(3, prompt=12, max_tokens=3))
    for _ in range(3):
        driver.step()
        assert states(driver) == [RUNNING, WAITING, WAITING]
        check_invariants(driver.scheduler)
    driver.step()
    assert states(driver) == [RUNNING, RUNNING, RUNNING]
    driver.run()


@pytest.mark.parametrize("how", ["cancel", "expire", "numerics"])
def test_the_others_go_on_without_their_leader(how: str) -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_batched_tokens=4, max_waiting_requests=3)
    requests = group(3, prompt=12, max_tokens=3)
    if how == "expire":
        requests[0].deadline = 5.0
    driver.add_group(requests)
    driver.step()
    match how:
        case "cancel":
            driver.cancel("r0")
        case "expire":
            driver.now = 5.0
        case "numerics":
            driver.runner.not_finite.add("r0")
    driver.run()
    assert all(request.output_token_ids == naive_output(request)[0] for request in requests[1:])


def test_others_are_served_while_a_group_waits_for_its_leader() -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    driver.add_group(group(2, prompt=20, max_tokens=3))
    driver.add(make_request("other", prompt=[9] * 4, max_tokens=2, arrival_time=1.0))
    driver.step()
    assert states(driver) == [RUNNING, WAITING, RUNNING]
    driver.run()


def test_a_parked_sequence_can_be_cancelled() -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_batched_tokens=4)
    driver.add_group(group(3, prompt=12, max_tokens=3))
    driver.step()
    for name in ("r1", "r2"):
        assert driver.cancel(name) is not None
        check_invariants(driver.scheduler)
    driver.run()


def test_a_leader_that_is_preempted_leads_again_when_it_returns() -> None:
    driver = SchedulerDriver(num_blocks=12, block_size=2, max_num_batched_tokens=2, max_num_seqs=4)
    busy = driver.add(make_request("busy", prompt=[8] * 2, max_tokens=16, priority=Priority.CRITICAL))
    requests = group(3, prompt=18, max_tokens=4)
    driver.add_group(requests)
    while not requests[0].num_preemptions:
        driver.step()
        check_invariants(driver.scheduler)
    assert busy.state is RUNNING and states(driver)[2:] == [WAITING, WAITING]
    driver.run()
    assert all(r.output_token_ids == naive_output(r)[0] for r in driver.requests.values())


def test_a_prompt_of_one_token_has_nothing_to_share() -> None:
    driver = SchedulerDriver(num_blocks=64)
    driver.add_group(group(3, prompt=1, max_tokens=3))
    driver.run()
    assert [request.num_cached_tokens for request in driver.requests.values()] == [0, 0, 0]


def test_sessions_keep_what_a_request_computed() -> None:
    driver = SchedulerDriver(num_blocks=64, block_size=4)
    first = driver.add(make_request("first", prompt=10, max_tokens=4, session_id="s", session_ttl=60.0))
    driver.run()
    turn = [*range(10), *first.output_token_ids, 7, 7]
    second = driver.add(make_request("second", prompt=turn, max_tokens=2, session_id="s", session_ttl=60.0))
    driver.run()
    assert second.num_cached_tokens == 13  # all but the last token of the first turn, which was never fed back
    assert driver.scheduler.stats().num_sessions == 1
    driver.scheduler.close_session("", "s")
    assert driver.scheduler.stats().num_sessions == 0
