"""What steps, preemptions and waiting cost, as learned from steps; and compute per byte."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.scheduler.scheduling import make_request, make_scheduler
from tidewheel.batch import SampledTokens
from tidewheel.scheduler.estimates import ServiceEstimate, StepTime
from tidewheel.scheduler.policy import compute_density


def test_as_many_tokens_as_a_slice_holds() -> None:
    assert StepTime().most_tokens(1.0) == 1
    assert learned(0.010, 0.002).most_tokens(0.051) == 20
    equal = StepTime()
    for number in range(9):
        equal.observe(4, 0.010, 0.1 * number)
    assert equal.most_tokens(0.020) == 8  # no slope: in proportion
    assert equal.most_tokens(0.001) == 0


def test_a_slice_is_cut_two_deviations_short() -> None:
    noisy = learned(0.010, 0.002, noise=0.020)  # 20 ms in the mean, and a deviation of 5.8 ms
    assert noisy.most_tokens(0.100) == pytest.approx(34, abs=1)
    assert noisy.most_tokens(0.050) == pytest.approx(9, abs=1)
    assert learned(0.0, 0.002, noise=0.100).most_tokens(0.110) == pytest.approx(2, abs=3)  # half of it at least


def learned(overhead: float, per_token: float, noise: float = 0.0, num_steps: int = 200) -> StepTime:
    """From steps that end every 0.15 s, from 0 on."""
    chance, step_time = random.Random(5), StepTime()
    for number in range(num_steps):
        tokens = chance.choice([0, 0, 0, 100, 700, 2048])
        step_time.observe(tokens, overhead + per_token * tokens + noise * chance.random(), 0.15 * number)
    return step_time


@given(overhead=st.floats(0.0, 1.0), per_token=st.floats(1e-6, 1e-2))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_overhead_and_slope_are_found(overhead: float, per_token: float) -> None:
    step_time = learned(overhead, per_token)
    assert step_time.seconds_per_token == pytest.approx(per_token, rel=1e-3)
    assert step_time.seconds(1000) == pytest.approx(overhead + 1000 * per_token, rel=1e-3)


def test_noise_does_not_hide_the_slope() -> None:
    assert learned(0.01, 1e-4, noise=0.02).seconds_per_token == pytest.approx(1e-4, rel=0.1)


def test_a_change_of_speed_is_followed() -> None:
    step_time = learned(0.01, 1e-4, num_steps=5000)
    for number in range(400):
        step_time.observe(1000 * (number % 3), 0.02 + 3e-4 * 1000 * (number % 3), 30.0)
    assert step_time.seconds_per_token == pytest.approx(3e-4, rel=0.02)


def test_steps_of_one_size_tell_no_slope() -> None:
    step_time = StepTime()
    assert step_time.seconds(100) == 0.0
    for _ in range(100):
        step_time.observe(64, 0.2, 0.0)
    assert step_time.seconds_per_token == 0.0
    assert step_time.seconds(1000) == pytest.approx(0.2)


def test_the_longest_step_to_expect_is_no_guess_that_is_too_short() -> None:
    step_time = StepTime()
    assert step_time.longest_seconds(1) is None
    step_time.observe(0, 0.1, 0.0)
    assert step_time.longest_seconds(0) == pytest.approx(0.1)
    assert step_time.longest_seconds(512) == pytest.approx(51.2)  # a token of a prompt costs no more than a step
    prefilled = StepTime()
    prefilled.observe(256, 2.0, 0.0)
    assert prefilled.longest_seconds(512) == pytest.approx(4.0)
    assert prefilled.longest_seconds(0) == pytest.approx(2.0)
    assert learned(0.01, 1e-4).longest_seconds(1000) == pytest.approx(0.11, rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 8192), st.floats(0.0, 10.0)), max_size=80), st.integers(0, 1 << 20))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_time_is_negative(steps: list[tuple[int, float]], tokens: int) -> None:
    step_time = StepTime()
    for num_tokens, seconds in steps:
        step_time.observe(num_tokens, seconds, 0.0)
    assert step_time.seconds(tokens) >= 0.0
    assert step_time.seconds_per_token >= 0.0


def returns_by_copy(step_time: StepTime, num_computed_tokens: int, seconds_per_block: float | None) -> bool:
    """Preempt a row of blocks of 16 tokens; return whether its blocks are copied to the host tier."""
    scheduler = make_scheduler(
        num_blocks=1024, block_size=16, num_host_blocks=1024, max_model_len=1 << 14, max_waiting_tokens=1 << 14,
        max_num_batched_tokens=1 << 14, swap_seconds_per_block=seconds_per_block,
    )  # fmt: skip
    request, state = make_request(prompt=num_computed_tokens, max_tokens=2), scheduler._state
    scheduler.add_group([request], 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    scheduler.apply(batch, SampledTokens(batch.step_id, np.array([5], np.int32)), 0.0)
    state.step_time = step_time
    state.preempt(request.row, 0.0)
    return state.stats.num_swap_preemptions == 1


def test_the_cheaper_way_back_is_taken() -> None:
    assert returns_by_copy(learned(0.01, 1e-4), 160, 2e-4)  # 16 ms against 4 ms
    assert not returns_by_copy(learned(0.01, 1e-4), 16, 2e-3)  # 1.6 ms against 4 ms


def test_without_a_host_tier_or_knowledge_it_is_recompute() -> None:
    assert not returns_by_copy(learned(0.01, 1e-4), 10_000, None)
    assert not returns_by_copy(StepTime(), 10_000, 1e-9)


def test_density_counts_what_is_computed_over_what_is_held() -> None:
    assert compute_density(100, 10) == pytest.approx(110 / 1050)
    assert compute_density(100, 10, num_cached_tokens=90) == pytest.approx(20 / 1050)


@given(prompt=st.integers(1, 1 << 20), output=st.floats(0.0, 1e6))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_density_is_finite_and_falls_as_the_output_grows(prompt: int, output: float) -> None:
    assert 0.0 < compute_density(prompt, output) < 10.0
    assert compute_density(prompt, output + 2.0) < compute_density(prompt, max(output, 1.0))


def backlogged(tokens_per_step: int, step_s: float = 0.1, num_steps: int = 300) -> ServiceEstimate:
    estimate = ServiceEstimate(learned(0.01, 1e-4), max_num_batched_tokens=1000)
    for number in range(num_steps):
        estimate.observe_step(number * step_s, tokens_per_step, 5)
    return estimate


def test_waiting_is_tokens_ahead_over_the_pace_under_backlog() -> None:
    estimate = backlogged(tokens_per_step=50)
    assert estimate.queue_seconds(2000, 30.0, has_free_rows=False) == pytest.approx(4.0, rel=0.02)


def test_with_rows_free_nothing_but_prefill_holds_up_what_waits_ahead() -> None:
    estimate = backlogged(tokens_per_step=50)
    prefill = estimate.prefill_seconds(2000, 30.0)
    assert estimate.queue_seconds(2000, 30.0, has_free_rows=True) == prefill < 1.0


def test_a_pause_of_the_machine_says_nothing_of_the_next_step() -> None:
    step_time = learned(0.01, 1e-4)
    expected = step_time.seconds(500)
    step_time.observe(500, 60.0, 30.0)
    assert step_time.seconds(500) < 2.0 * expected


def test_few_steps_and_old_ones_are_no_evidence() -> None:
    step_time = StepTime()
    for number in range(8):
        assert not step_time.is_fresh(float(number))
        step_time.observe(1, 3.0, float(number))
    step_time = learned(0.01, 1e-4)
    assert step_time.is_fresh(40.0) and not step_time.is_fresh(60.0)


def test_prefill_is_whole_budgets_and_a_rest() -> None:
    estimate = backlogged(50)
    assert estimate.prefill_seconds(2500, 30.0) == pytest.approx(2 * (0.01 + 0.1) + (0.01 + 0.05), rel=1e-3)
    assert estimate.prefill_seconds(1000, 30.0) == pytest.approx(0.11, rel=1e-3)
    assert estimate.prefill_seconds(1000, 90.0) == 0.0


def test_an_engine_with_nobody_to_serve_is_not_slow() -> None:
    estimate = ServiceEstimate(StepTime(), 1000)
    for number in range(100):
        estimate.observe_step(0.1 * number, 1, 0)
    assert estimate.queue_seconds(10_000, 10.0, has_free_rows=False) == 0.0


def test_the_pace_follows_a_change() -> None:
    estimate = backlogged(50)
    for number in range(300):
        estimate.observe_step(30.0 + 0.1 * number, 200, 5)
    assert estimate.queue_seconds(2000, 60.0, has_free_rows=False) == pytest.approx(1.0, rel=0.1)


def test_a_pause_between_backlogs_does_not_count() -> None:
    estimate = backlogged(50)
    estimate.observe_step(30.0, 50, 0)
    estimate.observe_step(40.0, 50, 5)
    assert estimate.queue_seconds(2000, 40.0, has_free_rows=False) == pytest.approx(4.0, rel=0.05)


def test_evidence_of_a_backlog_ages_though_no_step_runs() -> None:
    estimate = backlogged(50)
    assert estimate.queue_seconds(2000, 50.0, has_free_rows=False) == pytest.approx(4.0, rel=0.05)
    assert estimate.queue_seconds(2000, 6 * 3600.0, has_free_rows=False) == 0.0
