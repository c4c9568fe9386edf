"""Sessions through the scheduler: who leaves one, what the next turn computes, how long it stays."""

from __future__ import annotations

import pytest

from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.errors import NotFound
from tidewheel.request import FinishReason, Priority, Request


def turn(request_id: str, prompt: list[int], *, max_tokens: int = 3) -> Request:
    request = make_request(request_id, prompt, max_tokens=max_tokens)
    request.session_id, request.session_ttl = "s", 1000.0
    return request


def follow_up(request: Request, request_id: str = "next") -> Request:
    return turn(request_id, [*request.prompt_token_ids.tolist(), *request.output_token_ids, 7])


def test_the_next_turn_computes_its_new_tokens_alone() -> None:
    driver = SchedulerDriver()
    first = driver.add(turn("a", [1, 2, 3, 4, 5, 6]))
    driver.run()
    second = driver.add(follow_up(first))
    driver.run()
    assert second.num_cached_tokens == 8  # six of the prompt, two of three tokens: the last was never computed
    stats = driver.scheduler.stats()
    assert (stats.num_sessions, stats.num_device_hits) == (1, 8)


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_what_a_request_has_when_it_is_stopped_is_kept(reason: FinishReason) -> None:
    """A stop string is found outside, and ends the request by a cancel."""
    driver = SchedulerDriver()
    first = driver.add(turn("a", [1, 2, 3, 4, 5, 6], max_tokens=9))
    driver.step()
    driver.step()
    driver.cancel("a", reason)
    driver.run()
    second = driver.add(follow_up(first))
    driver.run()
    assert second.num_cached_tokens == 7


def test_a_request_that_failed_leaves_its_session_as_it_was() -> None:
    driver = SchedulerDriver()
    first = driver.add(turn("a", [1, 2, 3, 4, 5, 6]))
    driver.run()
    for request_id, reason in (("given up", FinishReason.ERROR), ("not finite", None)):
        failed = driver.add(turn(request_id, [*range(20, 30)], max_tokens=9))
        if reason is None:
            driver.runner.not_finite.add(request_id)
        driver.step()
        if reason is not None:
            driver.cancel(request_id, reason)
        driver.run()
        assert failed.finish_reason is FinishReason.ERROR
    second = driver.add(follow_up(first))
    driver.run()
    assert second.num_cached_tokens == 8


def test_a_session_that_is_closed_or_expires_is_gone() -> None:
    driver = SchedulerDriver()
    driver.add(turn("a", [1, 2, 3, 4, 5, 6]))
    driver.run()
    with pytest.raises(NotFound, match="session 'other' is not known"):
        driver.scheduler.close_session("", "other")
    driver.scheduler.close_session("", "s")
    assert driver.scheduler.stats().num_sessions == 0
    driver.add(turn("b", [1, 2, 3, 4, 5, 6]))
    driver.run()
    driver.scheduler.expire(driver.now + 999.0)
    assert driver.scheduler.stats().num_sessions == 1
    driver.scheduler.expire(driver.now + 1000.0)
    assert driver.scheduler.stats().num_sessions == 0


def test_slots_without_a_token_are_counted() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=5)
    driver.add(make_request("a", 10))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_taken_slots, stats.num_used_slots, stats.num_wasted_slots) == (12, 5, 2)


def test_no_session_comes_back_to_blocks_that_a_waiting_request_lacks() -> None:
    driver = SchedulerDriver(num_blocks=8, num_host_blocks=16, max_num_seqs=4, max_num_batched_tokens=64)
    kv = driver.kv
    for _ in range(40):
        kv.sessions.tools.begin("", "learn", ["read"], 0.0)
        kv.sessions.tools.end("", "learn", 10.0)
    driver.add(turn("a", [*range(12)]))
    driver.run()
    driver.scheduler.pause_session("", "s", ["read"], driver.now)
    begun = driver.now
    driver.add(make_request("takes all", prompt=[50] * 31, max_tokens=1))
    driver.run()
    assert kv.sessions.num_blocks("") == 0
    driver.add(make_request("runs", prompt=[60] * 5, max_tokens=11))
    driver.step()
    driver.now = begun + 9.5
    driver.add(make_request("lacks blocks", prompt=[70] * 25, priority=Priority.NORMAL, max_tokens=1))
    driver.step()
    assert driver.scheduler._state.blocked is not None
    assert kv.sessions.num_blocks("") == 0
    driver.run()
    check_invariants(driver.scheduler)
