"""Refusals that name the KV cache, and those that must not."""

from __future__ import annotations

from typing import Any

import pytest

from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.errors import KvCacheFull, WaitingSetFull


def refusal(driver: SchedulerDriver) -> WaitingSetFull:
    with pytest.raises(WaitingSetFull, match="waiting set is full: 2 of 2 requests") as caught:
        driver.add(make_request("late", prompt=2))
    return caught.value


def with_two_waiting(*, prompt: int = 8, running: int = 13, max_tokens: int = 4, **changes: Any) -> SchedulerDriver:
    """Make a scheduler that has run one step of a request and cannot enter two others."""
    changes = {"num_blocks": 4, "enable_prefix_caching": False, "max_waiting_requests": 2} | changes
    driver = SchedulerDriver(**changes)
    driver.add(make_request("runs", prompt=running, max_tokens=max_tokens))
    driver.step()
    for name in "ab":
        driver.add(make_request(name, prompt=prompt, max_tokens=2))
    driver.step()
    assert driver.scheduler.num_running == 1
    return driver


def test_a_full_cache_is_named_with_its_blocks() -> None:
    driver = with_two_waiting()
    error = refusal(driver)
    assert type(error) is KvCacheFull
    assert error.message.endswith("waits for blocks of the KV cache: 2 must be free, and 0 are")
    assert error.retry_after_ms is not None
    driver.run()


def test_blocks_that_are_free_again_are_not_lacking() -> None:
    driver = with_two_waiting()
    driver.scheduler.cancel("runs")
    assert driver.kv.num_free_blocks == 4
    assert type(refusal(driver)) is WaitingSetFull


def test_growth_of_requests_that_have_ended_is_not_needed() -> None:
    driver = with_two_waiting(num_blocks=8, running=8, max_tokens=24, prompt=12, admit_by_growth=True)
    driver.scheduler.cancel("runs")
    assert type(refusal(driver)) is WaitingSetFull


def test_a_shortage_of_a_request_that_has_left_is_forgotten() -> None:
    driver = with_two_waiting()
    driver.scheduler.cancel("a")
    driver.add(make_request("c", prompt=2))
    assert type(refusal(driver)) is WaitingSetFull  # nothing was planned since


def test_a_lack_of_rows_is_no_full_cache() -> None:
    assert type(refusal(with_two_waiting(max_num_seqs=1))) is WaitingSetFull


def test_a_batch_that_waits_for_the_last_one_is_no_full_cache() -> None:
    driver = with_two_waiting(scheduling_strategy="static", batch_size=1)
    assert type(refusal(driver)) is WaitingSetFull


def test_blocks_kept_for_running_requests_count_as_needed() -> None:
    driver = with_two_waiting(num_blocks=8, running=8, max_tokens=24, prompt=12, admit_by_growth=True)
    error = refusal(driver)
    assert type(error) is KvCacheFull and driver.kv.num_free_blocks >= 3, "the prompt itself would fit"
    assert f"and {driver.kv.num_free_blocks} are" in error.message
    driver.run()


def test_rows_that_run_out_of_blocks_let_nothing_in_for_want_of_blocks() -> None:
    driver = SchedulerDriver(num_blocks=4, enable_prefix_caching=False, max_waiting_requests=2)
    for name in "xy":
        driver.add(make_request(name, prompt=[ord(name)] * 7, max_tokens=8))
    driver.step()
    for name in "ab":
        driver.add(make_request(name, prompt=1, max_tokens=2))
    driver.step()
    driver.step()
    assert driver.scheduler.stats().num_preemptions == 1, "one row takes the other's blocks"
    assert type(refusal(driver)) is KvCacheFull
    driver.run()
