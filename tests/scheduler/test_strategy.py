"""When waiting requests may join, by each strategy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.scheduler.scheduling import make_config
from tidewheel.scheduler.strategy import (
    BATCHES_PER_REVIEW,
    MAX_WINDOW_S,
    MIN_WINDOW_S,
    STRATEGIES,
    TOLERANCE,
    DynamicStrategy,
    JoinView,
    PredictiveStrategy,
    Strategy,
)


def strategy(name: str, **settings: float) -> Strategy:
    config = make_config(scheduling_strategy=name, **settings)
    return STRATEGIES[name](config)


def dynamic_strategy(target_latency_s: float) -> DynamicStrategy:
    return DynamicStrategy(make_config(batch_target_latency_ms=1e3 * target_latency_s))


def view(waiting: int, running: int = 0, oldest: float = 0.0, most: int = 32) -> JoinView:
    return JoinView(running, waiting, oldest, most)


def test_continuous_lets_everybody_in() -> None:
    assert strategy("continuous").max_joins(0.0, view(waiting=7, running=30)) == 7


def test_static_waits_for_a_full_batch_or_the_timeout() -> None:
    static = strategy("static", batch_size=4, batch_timeout_ms=50.0)
    assert static.max_joins(0.02, view(waiting=3)) == 0
    assert static.max_joins(0.02, view(waiting=4)) == 4
    assert strategy("static", batch_size=4).max_joins(0.05, view(waiting=3)) == 3


def test_static_runs_a_batch_to_its_end() -> None:
    static = strategy("static", batch_size=4)
    assert static.max_joins(0.0, view(waiting=9)) == 4
    static.joined(3)  # the budget had no room for the fourth
    assert static.max_joins(0.1, view(waiting=6, running=3)) == 1
    static.joined(1)
    assert static.max_joins(9.0, view(waiting=5, running=1)) == 0
    assert static.max_joins(9.0, view(waiting=5, running=0)) == 4


def test_a_formed_batch_whose_last_requests_were_cancelled_is_complete() -> None:
    static = strategy("static", batch_size=4, batch_timeout_ms=50.0)
    assert static.max_joins(0.0, view(waiting=4)) == 4
    static.joined(2)
    assert static.max_joins(0.1, view(waiting=0, running=2)) == 0
    assert static.max_joins(0.1, view(waiting=3, running=2)) == 0


def test_dynamic_collects_for_the_window() -> None:
    dynamic = strategy("dynamic")
    assert dynamic.max_joins(0.049, view(waiting=3, running=2)) == 0
    assert dynamic.max_joins(0.051, view(waiting=3, running=2)) == 3
    dynamic.joined(3)
    assert dynamic.max_joins(0.052, view(waiting=1, running=5, oldest=0.052)) == 0


def test_dynamic_goes_when_every_place_is_taken() -> None:
    assert strategy("dynamic").max_joins(0.001, view(waiting=9, running=28)) == 4
    assert strategy("dynamic").max_joins(9.0, view(waiting=9, running=32)) == 0


def test_hybrid_is_asynchronous_below_the_threshold_and_behind_a_backlog() -> None:
    settings = {"hybrid_threshold": 8, "hybrid_backlog": 100}
    assert strategy("hybrid", **settings).max_joins(0.0, view(waiting=3, running=4)) == 3
    assert strategy("hybrid", **settings).max_joins(0.0, view(waiting=4, running=4)) == 0
    assert strategy("hybrid", **settings).max_joins(0.06, view(waiting=4, running=4)) == 4
    assert strategy("hybrid", **settings).max_joins(0.0, view(waiting=101, running=4, most=512)) == 101


def test_predictive_learns_how_many_come() -> None:
    predictive = PredictiveStrategy(make_config())
    now = 0.0
    for _ in range(60):  # 400 requests a second, asked every 5 ms
        for waiting in range(2, 100, 2):
            now += 0.005
            if predictive.max_joins(now, view(waiting=waiting, running=1, oldest=now - 0.005 * waiting / 2, most=99)):
                predictive.joined(waiting)
                break
    assert predictive.batch_size == pytest.approx(20, abs=1)  # 50 ms of them


def test_predictive_does_not_wait_for_what_does_not_come() -> None:
    predictive = strategy("predictive")
    for number in range(50):
        assert predictive.max_joins(0.1 * number, view(waiting=40, most=99, oldest=0.1 * number)) == 40
        predictive.joined(40)
    assert predictive.max_joins(10.0, view(waiting=1, oldest=9.95)) == 0
    assert predictive.max_joins(10.0, view(waiting=1, oldest=9.89)) == 1


@given(st.lists(st.floats(0.0, 10.0), max_size=200), st.floats(0.001, 5.0))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_window_stays_in_its_limits_and_moves_after_every_tenth_batch(
    latencies: list[float], target: float
) -> None:
    dynamic = dynamic_strategy(target)
    assert dynamic.window_s == 0.050
    for number, latency in enumerate(latencies, 1):
        before = dynamic.window_s
        dynamic.observe_batch(latency)
        assert MIN_WINDOW_S <= dynamic.window_s <= MAX_WINDOW_S
        if number % BATCHES_PER_REVIEW:
            assert dynamic.window_s == before
        elif dynamic.latency_s > TOLERANCE * (1e-3 * (1e3 * target)):
            assert dynamic.window_s < before or before == MIN_WINDOW_S
        else:
            assert dynamic.window_s > before or before == MAX_WINDOW_S


@given(load=st.floats(1.0, 8.0), point=st.floats(0.015, 0.09), overhead=st.floats(0.0, 0.2))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_window_settles_where_latency_meets_its_target(load: float, point: float, overhead: float) -> None:
    target = (overhead + load * point) / TOLERANCE
    dynamic = dynamic_strategy(target)
    for _ in range(400):
        dynamic.observe_batch(overhead + load * dynamic.window_s)
    settled = []
    for _ in range(200):
        dynamic.observe_batch(overhead + load * dynamic.window_s)
        settled.append(dynamic.window_s)
    assert max(settled) / min(settled) < 1.15
    assert min(settled) / 1.1 < point < max(settled) * 1.1


@given(
    st.sampled_from(["continuous", "static", "dynamic", "predictive", "hybrid"]),
    st.lists(st.tuples(st.floats(0.0, 0.2), st.integers(0, 9), st.integers(0, 9), st.integers(0, 40)), max_size=80),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_nobody_is_let_in_who_does_not_wait_and_everybody_gets_in(
    name: str, steps: list[tuple[float, int, int, int]]
) -> None:
    """Against a small engine: arrivals, requests that end, and a budget that lets only some of those allowed join."""
    joins, now, most = strategy(name, batch_size=4), 0.0, 16
    arrivals: list[float] = []
    running = 0

    def step(fitting: int) -> None:
        nonlocal running
        allowed = joins.max_joins(now, JoinView(running, len(arrivals), arrivals[0] if arrivals else 0.0, most))
        assert 0 <= allowed <= len(arrivals)
        joined = min(allowed, fitting, most - running)
        if joined:
            joins.joined(joined)
            joins.observe_batch(now - arrivals[0])
            running += joined
            del arrivals[:joined]

    for gap, arriving, ending, fitting in steps:
        now += gap
        running = max(running - ending, 0)
        arrivals += [now] * arriving
        step(fitting)
    for _ in range(len(arrivals) + 1):
        now += MAX_WINDOW_S
        running = 0
        step(most)
    assert not arrivals
