"""The circuit breaker: what opens it, whom it sheds, how it recovers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.errors import Busy
from tidewheel.request import Priority
from tidewheel.scheduler.breaker import MAX_PERIOD_S, MIN_ENDS, NUM_PROBES, PERIOD_S, BreakerState, CircuitBreaker

CRITICAL, HIGH, NORMAL, LOW = Priority


def shed(breaker: CircuitBreaker, now: float) -> list[Priority]:
    """Classes refused now."""
    refused = []
    for service_class in Priority:
        try:
            breaker.check(service_class, now)
        except Busy:
            refused.append(service_class)
    return refused


def fail(breaker: CircuitBreaker, now: float, count: int, of: int) -> None:
    for number in range(of):
        breaker.observe_end(number < count, now)


def opened(queue_time: float = 1.5) -> CircuitBreaker:
    """Open since time 0, with a limit of one second."""
    breaker = CircuitBreaker(None, 1.0)
    for _ in range(5):
        breaker.observe_queue_time(queue_time, HIGH, 0.0)
    assert breaker.state is BreakerState.OPEN
    return breaker


def half_open(queue_time: float = 1.5) -> CircuitBreaker:
    """Half open since the end of the first period."""
    breaker = opened(queue_time)
    breaker.check(CRITICAL, PERIOD_S)
    assert breaker.state is BreakerState.HALF_OPEN
    return breaker


def test_without_limits_it_never_opens() -> None:
    breaker = CircuitBreaker(None, None)
    fail(breaker, 0.0, 100, of=100)
    for _ in range(100):
        breaker.observe_queue_time(1e6, HIGH, 0.0)
    assert shed(breaker, 0.0) == []


def test_an_error_rate_over_the_limit_sheds_low_first() -> None:
    breaker = CircuitBreaker(0.5, None)
    fail(breaker, 0.0, MIN_ENDS, of=MIN_ENDS - 1)
    assert breaker.state is BreakerState.CLOSED  # too few to say
    breaker.observe_end(False, 0.0)
    assert breaker.state is BreakerState.OPEN
    assert shed(breaker, 0.0) == [LOW]
    assert breaker.num_shed == [0, 0, 0, 1]


def test_an_error_rate_under_the_limit_does_not_open_it() -> None:
    breaker = CircuitBreaker(0.5, None)
    for _ in range(20):
        fail(breaker, 0.0, 4, of=10)
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize(
    ("queue_time", "refused"),
    [(1.5, [LOW]), (2.5, [NORMAL, LOW]), (4.5, [HIGH, NORMAL, LOW]), (1e9, [HIGH, NORMAL, LOW])],
)
def test_the_worse_the_more_classes(queue_time: float, refused: list[Priority]) -> None:
    assert shed(opened(queue_time), 0.0) == refused


def test_the_message_says_what_when_and_why() -> None:
    with pytest.raises(Busy, match=r"class LOW are refused, queue time 1.5 s is over its limit of 1 s") as caught:
        opened().check(LOW, 2.0)
    assert caught.value.retry_after_ms == 3000


def test_as_it_lasts_more_classes_are_shed_but_never_critical() -> None:
    breaker, levels = opened(), []
    for period in range(1, 6):
        breaker.observe_queue_time(1.5, CRITICAL, (period - 0.5) * PERIOD_S)
        levels.append(len(shed(breaker, period * PERIOD_S)))
    assert levels == [2, 3, 3, 3, 3]
    assert CRITICAL not in shed(breaker, 6 * PERIOD_S)


def test_a_backlog_of_low_sheds_nobody_else() -> None:
    breaker = CircuitBreaker(None, 1.0)
    for number in range(1000):
        breaker.observe_queue_time(99.0, LOW, 0.1 * number)
        breaker.observe_queue_time(0.1, NORMAL, 0.1 * number)
        assert shed(breaker, 0.1 * number)[:2] in ([LOW], [])
    assert breaker.level == 1
    assert breaker.num_shed[LOW - 1] > 900


def test_when_the_signal_is_gone_probes_may_in() -> None:
    breaker = half_open()
    for _ in range(NUM_PROBES):
        breaker.check(LOW, PERIOD_S)
    with pytest.raises(Busy):
        breaker.check(LOW, PERIOD_S)


def test_good_probes_close_it() -> None:
    breaker = half_open()
    for _ in range(NUM_PROBES):
        breaker.observe_queue_time(0.1, HIGH, PERIOD_S + 1.0)
    assert breaker.state is BreakerState.CLOSED
    assert shed(breaker, PERIOD_S + 1.0) == []


def test_bad_probes_open_it_again_for_longer() -> None:
    breaker = half_open()
    for _ in range(NUM_PROBES):
        breaker.observe_queue_time(1.5, HIGH, PERIOD_S)
    assert breaker.state is BreakerState.OPEN
    assert shed(breaker, 2.9 * PERIOD_S) == [LOW]
    assert breaker.state is BreakerState.OPEN
    breaker.check(CRITICAL, 3.0 * PERIOD_S)
    assert breaker.state is BreakerState.HALF_OPEN


def test_classes_come_back_one_by_one_best_first() -> None:
    breaker, now, levels = half_open(4.5), PERIOD_S, []
    while breaker.state is not BreakerState.CLOSED:
        levels.append(breaker.level)
        for _ in range(NUM_PROBES):
            breaker.observe_queue_time(0.1, HIGH, now)
    assert levels == [3, 2, 1]


def test_a_period_without_verdict_counts_as_good_and_one_bad_probe_in_it_as_bad() -> None:
    quiet, slow = half_open(), half_open()
    slow.observe_queue_time(1.5, HIGH, PERIOD_S + 1.0)
    for breaker in (quiet, slow):
        breaker.check(CRITICAL, 2.0 * PERIOD_S)
    assert quiet.state is BreakerState.CLOSED
    assert slow.state is BreakerState.OPEN


def test_both_signals_must_speak_for_it() -> None:
    breaker = CircuitBreaker(0.5, 1.0)
    for _ in range(5):
        breaker.observe_queue_time(1.5, HIGH, 0.0)
    breaker.check(CRITICAL, PERIOD_S)
    for _ in range(NUM_PROBES):
        breaker.observe_queue_time(0.1, HIGH, PERIOD_S)
    assert breaker.state is BreakerState.HALF_OPEN
    fail(breaker, PERIOD_S, 0, of=NUM_PROBES)
    assert breaker.state is BreakerState.CLOSED


EVENTS = st.lists(
    st.tuples(
        st.floats(0.0, 10.0),
        st.sampled_from([*Priority, "end", "failed end", "start", "slow start", "very slow start"]),
    ),
    max_size=150,
)


@given(EVENTS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_whatever_happens(events: list[tuple[float, object]]) -> None:
    breaker, now, num_refused = CircuitBreaker(0.3, 1.0), 0.0, 0
    for gap, event in events:
        now += gap
        level = breaker.level
        if isinstance(event, Priority):
            try:
                breaker.check(event, now)
            except Busy as busy:
                num_refused += 1
                assert event is not CRITICAL
                assert busy.retry_after_ms is not None
                assert 0 < busy.retry_after_ms <= 1e3 * MAX_PERIOD_S
        elif "end" in str(event):
            breaker.observe_end(event == "failed end", now)
        else:
            breaker.observe_queue_time({"start": 0.1, "slow start": 1.5}.get(str(event), 9.0), HIGH, now)
        assert (breaker.level == 0) == (breaker.state is BreakerState.CLOSED)
        assert 0 <= breaker.level <= 3
        assert breaker.level >= level - 1
    assert sum(breaker.num_shed) == num_refused
    for _ in range(5):  # judged, and then class by class: a quiet time closes it
        now += MAX_PERIOD_S
        breaker.check(CRITICAL, now)
    assert breaker.state is BreakerState.CLOSED
