"""Two steps in flight over a device that computes late and may run out of memory at any moment."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.core_harness import CoreHarness, Event, arrivals
from support.engine.late_runner import LateRunner
from support.long_runs import examples
from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import make_request
from tidewheel.errors import EngineDead, InternalError
from tidewheel.request import FinishReason

SIZES = {
    "num_blocks": st.integers(10, 24),
    "max_num_batched_tokens": st.integers(1, 24),
    "max_num_seqs": st.integers(1, 5),
    "prefix_caching": st.booleans(),
}


def late_harness(**sizes: int) -> tuple[CoreHarness, LateRunner]:
    harness = CoreHarness(runner=LateRunner, max_inflight_steps=2, **sizes)
    assert isinstance(harness.runner, LateRunner)
    return harness, harness.runner


@settings(max_examples=examples(40, 100), deadline=None)
@given(events=arrivals(), sizes=st.fixed_dictionaries(SIZES))
def test_outputs_do_not_depend_on_when_the_device_is_done(events: list[Event], sizes: dict[str, int]) -> None:
    harness, runner = late_harness(**sizes)
    harness.play(events)
    harness.run()
    assert runner.most_in_flight <= 2
    assert FinishReason.ERROR not in harness.ended.values()


@settings(max_examples=examples(50, 150), deadline=None)
@given(
    events=arrivals(),
    sizes=st.fixed_dictionaries(SIZES),
    inflight=st.sampled_from([1, 2]),
    at_launch=st.lists(st.integers(0, 30), max_size=6),
    late=st.lists(st.integers(0, 30), max_size=6, unique=True),
)
def test_memory_runs_out_and_nothing_is_lost(
    events: list[Event], sizes: dict[str, int], inflight: int, at_launch: list[int], late: list[int]
) -> None:
    """Every request ends once, with its own tokens as far as it comes, and all blocks are back."""
    harness = CoreHarness(runner=LateRunner, max_inflight_steps=inflight, **sizes)
    runner = harness.runner
    assert isinstance(runner, LateRunner)
    runner.fails_at_launch, runner.fails_late = Counter(set(at_launch)), Counter(late)
    harness.play(events)
    harness.run()
    failed = [request for request in harness.requests.values() if request.finish_reason is FinishReason.ERROR]
    assert all("ran out of memory" in str(request.error) for request in failed)
    assert bool(failed) <= bool(runner.num_failures)


def running(runner_steps: int, *lengths: int) -> tuple[CoreHarness, LateRunner]:
    """Requests of these lengths, after so many turns of the loop."""
    harness, runner = late_harness(max_num_batched_tokens=64, max_num_seqs=8)
    for number, length in enumerate(lengths):
        harness.add(make_request("abcdef"[number], [number] * length, max_tokens=8))
    for _ in range(runner_steps):
        harness.core.step()
    return harness, runner


def test_a_launch_that_fails_ends_one_request_after_the_step_before_it() -> None:
    harness, runner = running(1, 3, 4)
    harness.add(make_request("long", 20))
    runner.fails_at_launch[1] = 1
    harness.run()
    ends = {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH, "long": FinishReason.ERROR}
    assert harness.ended == ends
    assert isinstance(harness.requests["long"].error, InternalError)


def test_a_step_that_fails_behind_the_next_launch_ends_those_in_it_alone() -> None:
    harness, runner = running(0, 3, 4)
    runner.fails_late[2] = 1
    harness.core.step()
    harness.core.step()
    harness.commands += [lambda: None, lambda: None, lambda: harness.add(make_request("late", 5))]
    harness.run()
    assert harness.ended == {"a": FinishReason.ERROR, "b": FinishReason.ERROR, "late": FinishReason.LENGTH}
    assert all(0 < len(harness.delivered[name]) < 8 for name in "ab")


def test_who_took_over_a_row_of_the_failed_step_goes_on() -> None:
    harness, runner = late_harness(max_num_seqs=1)
    harness.add(make_request("a", 4))
    runner.fails_late[0] = 1
    harness.core.step()
    harness.core.cancel("a")
    harness.add(make_request("b", 5))
    harness.run()
    assert runner.num_failures == 1
    assert harness.ended == {"a": FinishReason.CANCELLED, "b": FinishReason.LENGTH}


def test_another_error_with_two_in_flight_ends_all_and_gives_the_blocks_back() -> None:
    harness, runner = running(1, 3, 4)

    def broken(_batch: object) -> None:
        raise RuntimeError("device-side assert")

    runner.launch = broken  # type: ignore[assignment,method-assign]
    with pytest.raises(RuntimeError, match="device-side assert"):
        harness.core.step()
    assert harness.core.has_unfinished
    harness.core.fail_all(EngineDead("a step failed"))
    assert harness.ended == {"a": FinishReason.ERROR, "b": FinishReason.ERROR}
    assert not harness.core.has_unfinished
    check_invariants(harness.scheduler)
    assert harness.core.stats().num_free_blocks == 64


def test_busy_time_counts_no_moment_twice() -> None:
    """Each turn takes 2 s here, of which the device is busy in all: so much is counted, and not more."""
    harness, _ = running(0, 4)
    first = harness.now
    while harness.core.step():
        pass
    stats = harness.core.stats()
    assert stats.num_steps == 8
    assert stats.step_seconds <= harness.now - first
    assert stats.busy_fraction == pytest.approx(stats.step_seconds / harness.now) and stats.busy_fraction > 0.8
