"""Policies, ranks and the waiting set."""

from __future__ import annotations

import pytest

from support.scheduler.invariants import check_waiting_set
from support.scheduler.scheduling import SchedulerDriver, make_request, numbered
from tidewheel.errors import InternalError
from tidewheel.request import Priority, Request
from tidewheel.scheduler.policy import POLICIES, rank_of
from tidewheel.scheduler.queue import WaitingSet

CRITICAL, HIGH, NORMAL, LOW = Priority


def order(policy: str, *requests: Request) -> list[str]:
    """Ids of requests that arrived in this order, as they are served."""
    arrivals = [numbered(request, number) for number, request in enumerate(requests)]
    return [r.request_id for r in sorted(arrivals, key=lambda request: rank_of(POLICIES[policy], request))]


def test_fifo_goes_by_arrival() -> None:
    early = make_request("early", priority=LOW, arrival_time=1.0)
    late = make_request("late", priority=CRITICAL, arrival_time=2.0)
    assert order("fifo", late, early) == ["early", "late"]


@pytest.mark.parametrize("policy", ["priority", "sjf", "deadline", "density", "fair"])
def test_other_policies_go_by_class_first_and_by_arrival_last(policy: str) -> None:
    requests = [
        make_request(f"{level}{time}", priority=level, arrival_time=time) for level in Priority for time in (1.0, 2.0)
    ]
    shuffled = [requests[index] for index in (5, 2, 7, 0, 3, 6, 1, 4)]
    assert order(policy, *shuffled) == [request.request_id for request in requests]


def test_sjf_goes_by_what_is_left_of_the_predicted_output() -> None:
    short, long, nearly_done = (make_request(name) for name in ("short", "long", "nearly done"))
    for request, predicted in ((short, 10.0), (long, 50.0), (nearly_done, 50.0)):
        request.predicted_output_tokens = predicted
    nearly_done.output_token_ids += [1] * 45
    assert order("sjf", long, short, nearly_done) == ["nearly done", "short", "long"]


def test_deadline_goes_by_the_earliest_and_takes_the_soft_one_where_there_is_no_other() -> None:
    requests = [
        make_request("none", arrival_time=0.0),
        make_request("late", arrival_time=1.0, deadline=9.0, soft_deadline=1.0),
        make_request("soft", arrival_time=2.0, soft_deadline=5.0),
        make_request("soon", arrival_time=3.0, deadline=4.0),
    ]
    assert order("deadline", *requests) == ["soon", "soft", "late", "none"]


def test_density_goes_by_compute_per_byte() -> None:
    prefill, decode = make_request("prefill", prompt=200), make_request("decode", prompt=4)
    prefill.predicted_output_tokens, decode.predicted_output_tokens = 2.0, 200.0
    assert order("density", decode, prefill) == ["prefill", "decode"]


def test_ranks_are_total() -> None:
    assert order("priority", make_request("a"), make_request("b")) == ["a", "b"]


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_start_in_the_order_of_the_policy(policy: str) -> None:
    driver = SchedulerDriver(policy=policy, max_num_seqs=1)
    levels = [NORMAL, LOW, CRITICAL, HIGH, CRITICAL]
    for number, level in enumerate(levels):
        driver.add(make_request(f"r{number}", max_tokens=1, priority=level, arrival_time=float(number)))
    started = []
    while (batch := driver.schedule()) is not None:
        started += [new.request.request_id for new in batch.new_rows]
        driver.apply()
    assert started == (["r0", "r1", "r2", "r3", "r4"] if policy == "fifo" else ["r2", "r4", "r3", "r0", "r1"])


def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    driver = SchedulerDriver(num_blocks=8, block_size=4, max_num_batched_tokens=64)
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
    driver = SchedulerDriver(max_num_batched_tokens=8)
    driver.add(make_request("low", prompt=[1] * 20, priority=LOW))
    driver.step()
    driver.add(make_request("high", prompt=[2] * 5, priority=HIGH))
    driver.add(make_request("later", prompt=[3] * 6, priority=LOW, arrival_time=1.0))
    batch = driver.schedule()
    assert batch is not None
    assert [new.request.request_id for new in batch.new_rows] == ["high"]
    assert dict(zip(batch.rows.tolist(), batch.num_scheduled_tokens.tolist(), strict=True)) == {1: 5, 0: 3}
    driver.apply()
    driver.run()


def test_a_better_request_that_cannot_enter_does_not_stop_the_prompts_under_way() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=8, max_num_seqs=1)
    driver.add(make_request("low", prompt=[1] * 20, priority=LOW))
    driver.step()
    driver.add(make_request("high", prompt=[2] * 5, priority=HIGH))
    batch = driver.schedule()
    assert batch is not None
    assert (batch.rows.tolist(), batch.num_tokens) == ([0], 8)
    driver.apply()
    driver.run()


def test_the_waiting_set_counts_by_class() -> None:
    waiting = WaitingSet(POLICIES["priority"], None, {})
    requests = [
        make_request(f"r{number}", prompt=number + 1, priority=level)
        for number, level in enumerate([LOW, CRITICAL, LOW, NORMAL])
    ]
    for number, request in enumerate(requests):
        waiting.push(numbered(request, number))
        check_waiting_set(waiting)
    assert [waiting.num_tokens_ahead(level) for level in Priority] == [2, 2, 6, 10]
    assert [request.request_id for request in waiting] == ["r1", "r3", "r0", "r2"]
    assert next(waiting.candidates(with_new=True)) is requests[1]
    assert next(waiting.candidates(with_new=False), None) is None
    waiting.remove(requests[0])
    check_waiting_set(waiting)
    assert (waiting.num_new_tokens, waiting.num_new, waiting.lowest_class) == (9, 3, LOW)
    waiting.num_new += 1
    with pytest.raises(InternalError, match="new requests are miscounted"):
        check_waiting_set(waiting)
