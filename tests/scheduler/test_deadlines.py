"""Deadlines in the queue, in prefill and in decode, and the ones that are refused at the door."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from support.scheduler.scheduling import SchedulerDriver, make_request, make_scheduler
from tidewheel.errors import DeadlineExceeded
from tidewheel.event_heap import EventHeap, TimedEvent
from tidewheel.request import FinishReason, Priority, RequestState
from tidewheel.scheduler.scheduler import Scheduler


def test_one_that_never_started_ends_with_an_error_that_says_how_it_stood() -> None:
    driver = SchedulerDriver(max_num_seqs=1, num_blocks=64)
    driver.add(make_request("running", max_tokens=100))
    driver.step()
    late = driver.add(make_request("late", deadline=10.0, arrival_time=2.0))
    while driver.now < 12.0:
        driver.step()
    assert late.finish_reason is FinishReason.ERROR and isinstance(late.error, DeadlineExceeded)
    assert "passed after" in str(late.error) and "ms in the waiting set" in str(late.error)
    assert driver.scheduler.stats().num_expired == 1
    driver.cancel("running")


@pytest.mark.parametrize("max_inflight_steps", [1, 2])
@pytest.mark.parametrize(("prompt", "max_tokens"), [(200, 4), (4, 100)], ids=["prefill", "decode"])
def test_a_running_one_ends_with_what_it_has(prompt: int, max_tokens: int, max_inflight_steps: int) -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_batched_tokens=4, max_inflight_steps=max_inflight_steps)
    request = driver.add(make_request("a", prompt=prompt, max_tokens=max_tokens, deadline=20.0))
    while not request.is_finished:
        driver.step()
    assert request.finish_reason is FinishReason.DEADLINE and request.error is None
    assert bool(request.output_token_ids) == (prompt == 4)
    assert 20.0 <= driver.now < 23.0
    driver.run()


def test_a_preempted_one_ends_with_what_it_has() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4, max_num_batched_tokens=64)
    driver.add(make_request("a", prompt=[1] * 8, max_tokens=8))
    second = driver.add(make_request("b", prompt=[2] * 8, max_tokens=8, deadline=4.0))
    driver.step()
    driver.schedule()
    assert second.state is RequestState.PREEMPTED
    driver.now = 3.5
    driver.apply()
    driver.step()
    assert second.finish_reason is FinishReason.DEADLINE and len(second.output_token_ids) == 1
    driver.run()


def test_one_that_is_late_already_is_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(DeadlineExceeded, match="passed 500 ms before"):
        scheduler.add_group([make_request(deadline=1.0)], 1.5)
    assert not scheduler.has_unfinished and scheduler.stats().num_hopeless == 1


def loaded_scheduler(policy: str) -> Scheduler:
    """After two steps of a second with 64 tokens each, and prompts that still wait."""
    driver = SchedulerDriver(policy=policy, max_num_seqs=64, max_num_batched_tokens=64, num_blocks=512)
    for number in range(16):
        driver.add(make_request(f"r{number}", prompt=[number] * 10, max_tokens=1, arrival_time=float(number)))
    for _ in range(2):
        driver.step()
    return driver.scheduler


@pytest.mark.parametrize(
    ("policy", "priority", "is_refused"),
    [
        ("priority", Priority.NORMAL, True),
        ("priority", Priority.HIGH, False),
        ("fifo", Priority.HIGH, True),
        ("sjf", Priority.NORMAL, False),
        ("fair", Priority.NORMAL, False),
    ],
)
def test_a_deadline_that_the_queue_ahead_makes_impossible_is_refused(
    policy: str, priority: Priority, is_refused: bool
) -> None:
    scheduler = loaded_scheduler(policy)
    before = scheduler.stats()
    assert before.num_waiting > 0
    request = make_request("x", prompt=[50], priority=priority, arrival_time=4.0, deadline=4.9)
    if not is_refused:
        scheduler.add_group([request], 4.0)
        return
    with pytest.raises(
        DeadlineExceeded, match=r"the deadline is in 900 ms, .* tokens wait ahead, and 1 tokens of the prompt"
    ):
        scheduler.add_group([request], 4.0)
    assert replace(scheduler.stats(), tenants=before.tenants) == replace(before, num_hopeless=1)


def test_only_what_comes_before_the_deadline_is_expired() -> None:
    scheduler = make_scheduler()
    for name, deadline in (("a", 1.0), ("b", 2.0), ("c", None)):
        scheduler.add_group([make_request(name, deadline=deadline)], 0.0)
    assert [request.request_id for request in scheduler.expire(0.999)] == []
    assert [request.request_id for request in scheduler.expire(1.0)] == ["a"]
    assert [request.request_id for request in scheduler.expire(9.0)] == ["b"]
    assert scheduler.num_waiting == 1


def test_events_of_the_dead_are_bounded_by_the_living() -> None:
    heap = EventHeap(lambda event: not event.subject.is_finished)
    for number in range(10_000):
        request = make_request(f"r{number}")
        heap.push(1e9, request, 1)
        request.state = RequestState.FINISHED
        assert len(heap._heap) <= 2 * 1 + 64
    alive = make_request("alive")
    heap.push(1.0, alive, 1)
    assert [event.subject for event in heap.pop_due(1e9)] == [alive]
    assert not heap._heap


def test_events_pushed_while_others_are_popped_are_popped_too() -> None:
    heap = EventHeap(lambda event: True)
    request = make_request()
    heap.push(1.0, request, 1)
    times = []

    def follow(event: TimedEvent) -> None:
        times.append(event.time)
        heap.push(event.time + 2.0, request, 1)

    for event in heap.pop_due(6.0):
        follow(event)
    assert times == [1.0, 3.0, 5.0]
