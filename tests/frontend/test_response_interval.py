"""Control law of the interval between responses, fed with measured values."""

from __future__ import annotations

import pytest

from tidewheel.frontend.threads import SHARE, ResponseInterval
from tidewheel.processor_use import ProcessorUse

QUIET = ProcessorUse(used=1.4, idle=0.6)
BESIDE_ONE = ProcessorUse(used=1.0, idle=0.0)
TURN_S, LONGEST_S = 1e-4, 0.02


def settled(use: ProcessorUse, *, processors: int = 2, turn_s: float = TURN_S) -> ResponseInterval:
    interval = ResponseInterval(LONGEST_S, 2, processors)
    settle(interval, use, turn_s)
    return interval


def settle(interval: ResponseInterval, use: ProcessorUse, turn_s: float = TURN_S) -> None:
    for _ in range(20):
        interval.observe(use)
    for _ in range(1000):
        interval.add_turn(turn_s, turn_s)


def test_turns_at_the_interval_take_the_budget() -> None:
    assert 256 / settled(QUIET).seconds(256) * TURN_S == pytest.approx(SHARE * 2)


def test_a_busy_neighbour_and_costly_turns_make_it_longer() -> None:
    quiet = settled(QUIET).seconds(256)
    assert settled(BESIDE_ONE).seconds(256) == pytest.approx(2 * quiet, rel=1e-3)
    assert settled(QUIET, turn_s=3 * TURN_S).seconds(256) == pytest.approx(3 * quiet)


def test_it_is_as_before_after_the_neighbour() -> None:
    interval = settled(BESIDE_ONE)
    settle(interval, QUIET)
    assert interval.seconds(256) == pytest.approx(settled(QUIET).seconds(256), rel=1e-3)


def test_many_neighbours_leave_half_of_the_processors() -> None:
    crowded = settled(ProcessorUse(used=0.1, idle=0.0)).seconds(1)
    assert crowded == pytest.approx(settled(BESIDE_ONE).seconds(1))
