"""Policies, ranks, victims and the waiting set."""

from __future__ import annotations

import pytest

from support.scheduling import Driver, make_config, make_request
from tidewheel.errors import ConfigError, InternalError
from tidewheel.request import Priority
from tidewheel.scheduler.policy import POLICIES, choose_victim, fifo, priority, rank
from tidewheel.scheduler.queue import WaitingSet

CRITICAL, HIGH, NORMAL, LOW = Priority


def test_fifo_goes_by_arrival() -> None:
    early = make_request("early", priority=LOW, arrival_time=1.0)
    late = make_request("late", priority=CRITICAL, arrival_time=2.0)
    assert fifo(early) < fifo(late)


def test_priority_goes_by_class_then_by_arrival() -> None:
    requests = [
        make_request(f"{level}{time}", priority=level, arrival_time=time) for level in Priority for time in (1.0, 2.0)
    ]
    shuffled = [requests[index] for index in (5, 2, 7, 0, 3, 6, 1, 4)]
    assert sorted(shuffled, key=priority) == requests


def test_ranks_are_total() -> None:
    twins = [make_request(name) for name in "ab"]
    assert rank(priority, twins[0], 0) < rank(priority, twins[1], 1)


def test_the_victim_is_served_last() -> None:
    assert choose_victim({0: (2, 5.0, 1), 1: (4, 1.0, 0), 2: (4, 3.0, 2), 3: (1, 9.0, 3)}) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_start_in_the_order_of_the_policy(policy: str) -> None:
    driver = Driver(policy=policy, max_num_seqs=1)
    levels = [NORMAL, LOW, CRITICAL, HIGH, CRITICAL]
    for number, level in enumerate(levels):
        driver.add(make_request(f"r{number}", max_tokens=1, priority=level, arrival_time=float(number)))
    started = []
    while (batch := driver.schedule()) is not None:
        started += [new.request_id for new in batch.new_rows]
        driver.apply()
    assert started == {"fifo": ["r0", "r1", "r2", "r3", "r4"], "priority": ["r2", "r4", "r3", "r0", "r1"]}[policy]


def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    driver = Driver(num_blocks=8, block_size=4, max_num_batched_tokens=64)
    driver.add(make_request("running", prompt=[1] * 20, max_tokens=4))
    driver.step()
    driver.add(make_request("wide", prompt=[2] * 16, max_tokens=2, arrival_time=1.0))
    driver.add(make_request("narrow", prompt=[3], max_tokens=2, arrival_time=2.0))
    batch = driver.schedule()
    assert batch is not None
    assert batch.new_rows == ()
    driver.apply()
    driver.run()


def test_the_budget_goes_to_the_best_prompt_under_way_or_waiting() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(make_request("low", prompt=[1] * 20, priority=LOW))
    driver.step()
    driver.add(make_request("high", prompt=[2] * 5, priority=HIGH))
    driver.add(make_request("later", prompt=[3] * 5, priority=LOW, arrival_time=1.0))
    batch = driver.schedule()
    assert batch is not None
    assert [new.request_id for new in batch.new_rows] == ["high"]
    assert dict(zip(batch.rows.tolist(), batch.num_scheduled_tokens.tolist(), strict=True)) == {1: 5, 0: 3}
    driver.apply()
    driver.run()


def test_a_better_request_that_cannot_enter_does_not_stop_the_prompts_under_way() -> None:
    driver = Driver(max_num_batched_tokens=8, max_num_seqs=1)
    driver.add(make_request("low", prompt=[1] * 20, priority=LOW))
    driver.step()
    driver.add(make_request("high", prompt=[2] * 5, priority=HIGH))
    batch = driver.schedule()
    assert batch is not None
    assert (batch.rows.tolist(), batch.num_tokens) == ([0], 8)
    driver.apply()
    driver.run()


def test_the_waiting_set_counts_by_class() -> None:
    waiting = WaitingSet()
    requests = [
        make_request(f"r{number}", prompt=number + 1, priority=level)
        for number, level in enumerate([LOW, CRITICAL, LOW, NORMAL])
    ]
    for number, request in enumerate(requests):
        waiting.push(rank(priority, request, number), request)
        waiting.check_invariants()
    assert waiting.by_class == (1, 0, 1, 2)
    assert [request.request_id for request in waiting] == ["r1", "r3", "r0", "r2"]
    assert waiting.head() is requests[1]
    assert waiting.remove(requests[0]) == rank(priority, requests[0], 0)
    waiting.check_invariants()
    assert (len(waiting), waiting.num_tokens, waiting.num_new, waiting.by_class) == (3, 9, 3, (1, 0, 1, 1))
    waiting.num_tokens += 1
    with pytest.raises(InternalError, match="tokens are miscounted"):
        waiting.check_invariants()


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("max_num_seqs", 0, "max_num_seqs is 0"),
        ("max_num_batched_tokens", -1, "max_num_batched_tokens is -1"),
        ("max_waiting_tokens", 0, "max_waiting_tokens is 0"),
        ("policy", "lifo", "'lifo': choose one of fifo, priority"),
        ("max_inflight_steps", 3, "max_inflight_steps is 3"),
        ("watermark", 1.0, "watermark is 1.0"),
    ],
)
def test_impossible_settings_name_themselves(setting: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**{setting: value})
