"""Who may wait, who is told to come back, and who is told never to."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import SchedulerDriver, make_request, make_scheduler, numbered
from tidewheel.errors import Busy, InvalidRequest, PromptTooLarge
from tidewheel.request import Request
from tidewheel.scheduler.admission import AdmissionControl
from tidewheel.scheduler.scheduler import Scheduler


def refused(scheduler: Scheduler, request: Request) -> str:
    before = scheduler.stats()
    with pytest.raises(InvalidRequest) as caught:
        scheduler.add_group([request], 0.0)
    assert replace(scheduler.stats(), tenants=before.tenants) == before
    check_invariants(scheduler)
    return caught.value.message


def test_an_empty_prompt_is_refused() -> None:
    assert "prompt is empty" in refused(make_scheduler(), make_request(prompt=0))


def test_max_tokens_below_one_is_refused() -> None:
    assert "max_tokens is 0" in refused(make_scheduler(), make_request(max_tokens=0))


def test_min_tokens_above_the_resolved_max_tokens_are_refused() -> None:
    assert "min_tokens is 9, more than max_tokens 4" in refused(make_scheduler(), make_request(min_tokens=9))


def test_prompt_and_output_must_fit_the_context() -> None:
    scheduler = make_scheduler(max_model_len=20)
    message = refused(scheduler, make_request(prompt=15, max_tokens=6))
    assert "15" in message and "6" in message and "20" in message
    scheduler.add_group([make_request(prompt=14, max_tokens=6)], 0.0)


@pytest.mark.parametrize(("max_tokens", "fits"), [(5, True), (6, False)])
def test_what_can_never_fit_the_pool_is_refused_at_once(max_tokens: int, fits: bool) -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4)
    request = make_request(prompt=12, max_tokens=max_tokens)  # the last token needs no slot
    if fits:
        driver.add(request)
        driver.run()
    else:
        message = refused(driver.scheduler, request)
        assert "the context of 17 leaves room for 5" in message


def test_the_waiting_set_is_bounded_in_requests() -> None:
    scheduler = make_scheduler(max_waiting_requests=2)
    for name in "ab":
        scheduler.add_group([make_request(name)], 0.0)
    before = scheduler.stats()
    with pytest.raises(Busy, match="2 of 2 requests") as caught:
        scheduler.add_group([make_request("c")], 0.0)
    assert caught.value.retry_after_ms is not None
    assert str(caught.value).startswith("[TW-BUSY retry_after_ms=")
    assert replace(scheduler.stats(), tenants=before.tenants) == before
    assert scheduler.cancel("a") is not None
    scheduler.add_group([make_request("c")], 0.0)


def test_the_waiting_set_is_bounded_in_tokens() -> None:
    scheduler = make_scheduler(max_waiting_tokens=20)
    scheduler.add_group([make_request("a", prompt=12)], 0.0)
    with pytest.raises(Busy, match="12 of 20 tokens, and this prompt has 9"):
        scheduler.add_group([make_request("b", prompt=9)], 0.0)
    scheduler.add_group([make_request("c", prompt=8)], 0.0)


def test_a_prompt_longer_than_may_ever_wait_is_not_told_to_come_back() -> None:
    with pytest.raises(PromptTooLarge, match="21 tokens: at most 20"):
        make_scheduler(max_waiting_tokens=20).add_group([make_request(prompt=21)], 0.0)


def test_preempted_requests_do_not_count_against_newcomers() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4, max_num_batched_tokens=64, max_waiting_requests=2)
    for name in "ab":
        driver.add(make_request(name, prompt=[ord(name)] * 8, max_tokens=4))
    driver.step()
    driver.step()
    assert driver.requests["b"].num_preemptions == 1
    for name in "cd":
        driver.add(make_request(name, prompt=2, max_tokens=2))
    assert driver.scheduler.num_waiting == 3
    with pytest.raises(Busy, match="2 of 2 requests"):
        driver.add(make_request("e", prompt=2, max_tokens=2))
    driver.run()


def limits_with_waiting(
    arrival_time: float, num_waiting: int, *, pace_s: float = 0.0, num_starts: int = 0
) -> AdmissionControl:
    scheduler = make_scheduler(policy="fifo")
    for number in range(num_waiting):
        scheduler._state.waiting.push(numbered(make_request(f"r{number}", arrival_time=arrival_time), number))
    for number in range(num_starts):
        scheduler.admission.observe_starts([make_request("started")], number * pace_s)
    return scheduler.admission


def test_the_retry_hint_is_the_time_for_half_of_the_waiting_set() -> None:
    limits = limits_with_waiting(0.0, 100, pace_s=0.1, num_starts=200)
    assert limits.retry_after_ms(199 * 0.1) == pytest.approx(5000, abs=1)


def test_the_retry_hint_has_bounds_and_a_first_value() -> None:
    assert limits_with_waiting(0.0, 1000).retry_after_ms(5.0) == 250
    assert limits_with_waiting(0.0, 10, num_starts=200).retry_after_ms(0.0) == 50
    assert limits_with_waiting(0.0, 1000, pace_s=100.0, num_starts=3).retry_after_ms(200.0) == 30_000


def test_a_head_that_waits_long_is_a_slow_pace_and_an_idle_hour_is_not() -> None:
    assert limits_with_waiting(0.0, 10, pace_s=0.001, num_starts=200).retry_after_ms(2.199) == 10_000
    assert limits_with_waiting(3600.0, 10, pace_s=0.001, num_starts=200).retry_after_ms(3600.0) == 50
