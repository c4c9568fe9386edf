"""Leaving while a batch is in flight, and two batches in flight."""

from __future__ import annotations

import numpy as np
import pytest

from support.engine.fake_runner import naive_output
from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.batch import SampledTokens
from tidewheel.errors import EngineDead, InternalError
from tidewheel.request import FinishReason, RequestState


def test_the_second_batch_starts_where_the_first_will_end() -> None:
    driver = SchedulerDriver(max_inflight_steps=2, max_num_batched_tokens=8)
    driver.add(make_request(prompt=12, max_tokens=4))
    starts = []
    for _ in range(2):
        batch = driver.schedule()
        assert batch is not None
        starts.append((batch.start_positions.tolist(), batch.num_scheduled_tokens.tolist(), batch.samples.tolist()))
    assert starts == [([0], [8], [False]), ([8], [4], [True])]
    assert driver.schedule() is None  # two are in flight
    driver.apply()
    batch = driver.schedule()
    assert batch is not None
    assert batch.start_positions.tolist() == [12]  # a token that only the device knows yet
    driver.apply()
    driver.run()


def test_the_end_by_length_is_known_ahead() -> None:
    driver = SchedulerDriver(max_inflight_steps=2)
    driver.add(make_request(prompt=4, max_tokens=2))
    assert driver.schedule() is not None
    assert driver.schedule() is not None
    driver.apply()
    assert driver.schedule() is None  # the last token is in flight
    driver.apply()
    assert driver.ended.keys() == {"a"}


def test_the_extra_token_after_a_stop_is_dropped() -> None:
    driver = SchedulerDriver(max_inflight_steps=2)
    output, _ = naive_output(make_request(prompt=4, max_tokens=8))
    request = driver.add(make_request(prompt=4, max_tokens=8, stop_token_ids=(output[1],)))
    driver.schedule()
    driver.schedule()
    driver.apply()
    driver.schedule()
    driver.apply()
    assert request.finish_reason is FinishReason.STOP
    stats = driver.scheduler.stats()
    assert stats.num_free_blocks < stats.num_blocks  # a batch in flight still names them
    outputs = driver.apply()
    assert outputs.requests == [] and outputs.finished == []
    assert request.output_token_ids == output[: output.index(output[1]) + 1]
    assert driver.scheduler.stats().num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("max_inflight_steps", [1, 2])
def test_a_cancel_in_flight_delivers_nothing_more_and_gives_the_blocks_back(max_inflight_steps: int) -> None:
    driver = SchedulerDriver(max_inflight_steps=max_inflight_steps)
    request = driver.add(make_request("a", prompt=6, max_tokens=8))
    other = driver.add(make_request("b", prompt=[3] * 6, max_tokens=8))
    driver.step()
    while driver.schedule() is not None:
        pass
    assert driver.cancel("a") is request
    assert request.state is RequestState.FINISHED
    check_invariants(driver.scheduler)
    while driver.in_flight:
        assert driver.apply().requests == [other]
    assert driver.scheduler.stats().num_free_blocks == 32 - 2
    driver.run()


def test_a_row_changes_hands_while_in_flight() -> None:
    driver = SchedulerDriver(max_num_seqs=1, max_inflight_steps=2)
    driver.add(make_request("a", prompt=6, max_tokens=8))
    driver.schedule()
    driver.cancel("a")
    second = driver.add(make_request("b", prompt=[3] * 6, max_tokens=2))
    batch = driver.schedule()
    assert batch is not None
    assert batch.freed_rows.tolist() == [0]
    assert [new.row for new in batch.new_rows] == [0]
    assert driver.apply().requests == []
    assert driver.apply().requests == [second]
    driver.run()


@pytest.mark.parametrize(
    ("num_steps", "state", "num_output_tokens"),
    [
        (0, RequestState.WAITING, 0),
        (1, RequestState.RUNNING, 0),  # in the middle of its prompt
        (2, RequestState.RUNNING, 1),
        (3, RequestState.PREEMPTED, 1),
    ],
)
def test_a_cancel_works_at_every_stage(num_steps: int, state: RequestState, num_output_tokens: int) -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4, max_num_batched_tokens=10)
    driver.add(make_request("a", prompt=[1] * 7, max_tokens=8))
    request = driver.add(make_request("b", prompt=[2] * 7, max_tokens=8))
    for _ in range(num_steps):
        driver.step()
    assert (request.state, len(driver.delivered["b"])) == (state, num_output_tokens)
    assert driver.cancel("b", FinishReason.DEADLINE) is request
    check_invariants(driver.scheduler)
    driver.run()


def test_cancel_of_an_unknown_or_finished_request_is_none() -> None:
    driver = SchedulerDriver()
    driver.add(make_request("a", max_tokens=1))
    driver.run()
    assert driver.scheduler.cancel("a") is None
    assert driver.scheduler.cancel("never") is None


def test_a_victim_in_flight_is_waited_for_and_no_second_one_is_taken() -> None:
    driver = SchedulerDriver(num_blocks=6, block_size=4, max_num_batched_tokens=64, max_inflight_steps=2)
    requests = [
        driver.add(make_request(name, prompt=[index] * 7, max_tokens=6, arrival_time=float(index)))
        for index, name in enumerate("abc")
    ]
    driver.schedule()
    driver.schedule()  # fills the blocks
    driver.apply()
    batch = driver.schedule()
    assert [request.state is RequestState.PREEMPTED for request in requests] == [False, False, True]
    assert batch is None  # a and b wait for the blocks of c
    driver.apply()
    batch = driver.schedule()
    assert batch is not None
    assert batch.rows.tolist() == [0, 1]
    driver.apply()
    driver.run()


@pytest.mark.parametrize("max_inflight_steps", [1, 2])
def test_fail_all_ends_everything(max_inflight_steps: int) -> None:
    driver = SchedulerDriver(max_num_seqs=2, max_inflight_steps=max_inflight_steps)
    for name in "abc":
        driver.add(make_request(name, prompt=[ord(name)] * 5, max_tokens=6))
    driver.step()
    batch = driver.schedule()
    assert batch is not None
    failed = driver.fail_all(EngineDead("the engine ended"))
    assert [request.request_id for request in failed] == ["a", "b", "c"]
    assert all(request.finish_reason is FinishReason.ERROR for request in failed)
    check_invariants(driver.scheduler)
    assert driver.scheduler.stats().num_free_blocks == 32
    late = SampledTokens(batch.step_id, np.zeros(len(batch.rows), dtype=np.int32))
    with pytest.raises(InternalError, match="oldest"):
        driver.scheduler.apply(batch, late, 0.0)


def test_fail_all_then_new_requests_run() -> None:
    driver = SchedulerDriver(max_inflight_steps=2)
    driver.add(make_request("a", prompt=5, max_tokens=6))
    driver.step()
    driver.fail_all(InternalError("the device is lost"))
    again = driver.add(make_request("b", prompt=5, max_tokens=6))
    driver.run()
    assert again.finish_reason is FinishReason.LENGTH
