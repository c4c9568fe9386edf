"""Which weights compute a step, who is told, and which blocks of whom are found again."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import SchedulerDriver, make_request
from support.scheduler.weighed_runner import WeighedRunner, weighed
from tidewheel.request import Priority, Request
from tidewheel.scheduler.controllers import HOLD_S, LATENCY_RELIEVED, MEMORY_RELIEVED, PressureController

MAX_USAGE, MAX_LATENCY_S = 0.9, 0.5
MOMENTS = st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=60)


def controller() -> PressureController:
    return PressureController(MAX_USAGE, MAX_LATENCY_S)


@given(MOMENTS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_pressure_begins_above_a_limit_and_ends_only_after_a_time_below_the_lower_one(
    moments: list[tuple[float, float, float]],
) -> None:
    chosen, now, was_on, pressed_at = controller(), 0.0, False, 0.0
    for gap, usage, wait in moments:
        now += gap
        is_on = chosen.decide(now, usage, wait)
        is_high = usage > MAX_USAGE or wait > MAX_LATENCY_S
        is_low = usage <= MEMORY_RELIEVED * MAX_USAGE and wait <= LATENCY_RELIEVED * MAX_LATENCY_S
        assert is_on or not is_high
        assert was_on or is_on == is_high
        if is_high or (was_on and not is_low):
            pressed_at = now
        assert not (was_on and not is_on) or now - pressed_at >= HOLD_S
        was_on = is_on


def test_a_value_at_its_limit_is_no_pressure() -> None:
    assert not controller().decide(0.0, MAX_USAGE, MAX_LATENCY_S)


def test_slow_steps_are_pressure_and_an_idle_time_forgets_them() -> None:
    chosen = controller()
    chosen.observe_step(1.0, 10.0)
    assert chosen.decide(1.0, 0.0, 0.0)
    assert chosen.decide(1.0 + 0.9 * HOLD_S, 0.0, 0.0)
    assert not chosen.decide(10.0, 0.0, 0.0)
    chosen.observe_step(10.0, 0.1)
    assert not chosen.decide(10.0, 0.0, 0.0)


def driver(**changes: Any) -> tuple[SchedulerDriver, WeighedRunner]:
    made = SchedulerDriver(has_quantized_copy=True, **changes)
    return made, weighed(made.runner)


def press(made: SchedulerDriver, is_on: bool) -> None:
    pressure = made.scheduler._control._pressure
    assert pressure is not None
    pressure.decide = lambda *_: is_on  # type: ignore[method-assign]


def answer(made: SchedulerDriver, request: Request) -> Request:
    made.add(request)
    made.run()
    return request


def test_a_wait_or_full_cache_switches_and_the_end_of_both_switches_back() -> None:
    made, _ = driver(num_blocks=8, max_num_seqs=1, max_num_batched_tokens=16)
    made.tick = 0.1
    first, second = (make_request(name, 4, max_tokens=8) for name in "ab")
    made.add(first)
    assert made.schedule().weights == "full"
    made.apply()
    made.add(second)
    made.run()  # the second waits for longer than 500 ms
    made.now += 10.0
    third = answer(made, make_request("c", 4, max_tokens=8, arrival_time=made.now))
    assert [one.weights_used for one in (first, second, third)] == ["mixed", "quantized", "full"]
    stats = made.scheduler.stats()
    assert stats.num_full_steps + stats.num_quantized_steps == stats.num_steps and stats.num_quantized_steps >= 8


@pytest.mark.parametrize("degrades", [False, True])
def test_a_step_with_a_critical_request_keeps_full_weights_unless_told_otherwise(degrades: bool) -> None:
    made, _ = driver(pressure_quantization_critical=degrades)
    press(made, True)
    normal = made.add(make_request("a", 4, max_tokens=6))
    assert made.schedule().weights == "quantized"
    made.apply()
    critical = made.add(make_request("b", 4, max_tokens=2, priority=Priority.CRITICAL))
    weights = []
    while not critical.is_finished:
        weights.append(made.schedule().weights)
        made.apply()
    assert set(weights) == {"quantized" if degrades else "full"}
    made.run()
    assert critical.weights_used == ("quantized" if degrades else "full")
    assert normal.weights_used == ("quantized" if degrades else "mixed")


def test_full_weights_find_no_block_of_quantised_ones_which_find_their_own() -> None:
    made, _ = driver()
    press(made, True)
    assert answer(made, make_request("a", 13)).num_cached_tokens == 0
    assert answer(made, make_request("b", 13)).num_cached_tokens == 12
    press(made, False)
    again = answer(made, make_request("c", 13))
    assert (again.num_cached_tokens, again.weights_used) == (0, "full")


def test_quantised_weights_go_on_from_full_ones_that_computed_most_of_the_prompt() -> None:
    made, _ = driver(num_blocks=64)
    press(made, False)
    answer(made, make_request("a", 13))
    press(made, True)
    most = answer(made, make_request("b", [*range(12), 30, 31, 32, 33, 34]))
    assert (most.num_cached_tokens, most.weights_used) == (12, "mixed")
    little = answer(made, make_request("c", [*range(4), *range(20, 33)]))
    assert (little.num_cached_tokens, little.weights_used) == (0, "quantized")
    press(made, False)
    after = answer(made, make_request("d", [*range(12), 30, 31, 32, 33, 34]))
    assert (after.num_cached_tokens, after.weights_used) == (12, "full")  # what was computed by both is not found


def test_a_request_of_both_weights_publishes_what_the_first_computed_alone() -> None:
    made, _ = driver(max_num_batched_tokens=8, num_blocks=64)
    mixed = made.add(make_request("a", 24))
    for is_on in (False, True, True):
        press(made, is_on)
        made.step()
    assert mixed.first_token_time is not None
    press(made, False)
    made.run()
    assert mixed.weights_used == "mixed"
    assert answer(made, make_request("b", 24)).num_cached_tokens == 8


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("max_inflight_steps", [1, 2])
def test_answers_name_the_weights_of_all_that_they_read(seed: int, max_inflight_steps: int) -> None:
    made, runner = driver(
        num_blocks=24, max_num_batched_tokens=12, max_num_seqs=5, num_host_blocks=6 * (seed % 2),
        max_inflight_steps=max_inflight_steps, preemption_mode="swap" if seed % 2 else "recompute",
    )  # fmt: skip
    draw, requests = random.Random(seed), list[Request]()
    for number in range(60):
        press(made, draw.random() < 0.5)
        if number < 30:
            requests += (group := drawn(draw, number))
            made.add_group(group)
        if draw.random() < 0.05:
            made.cancel(draw.choice(requests).request_id)
        made.step()
        check_invariants(made.scheduler)
    made.run()
    for request in requests:
        read = runner.read.get(request.request_id, set())
        if read and not request.num_preemptions:
            assert request.weights_used == ("mixed" if len(read) == 2 else next(iter(read)))
        if request.priority is Priority.CRITICAL:
            assert read <= {"full"}


def drawn(draw: random.Random, number: int) -> list[Request]:
    """Return sequences of a prompt that begins like others, some in a session."""
    prompt = [draw.randrange(2)] * draw.choice([3, 8, 13]) + [number] * draw.randrange(8)
    session = draw.choice(["", "", "s"])
    fields = {"max_tokens": draw.randrange(1, 12), "priority": draw.choice(list(Priority))}
    leader = make_request(f"{number}", prompt, session_id=session, session_ttl=1e3, **fields)
    others = range(0 if session else draw.choice([0, 0, 2]))
    return [leader, *(make_request(f"{number}.{other}", prompt, leader=leader, **fields) for other in others)]
