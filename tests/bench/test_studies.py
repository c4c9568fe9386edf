"""What the studies share: turns, and the rate of an engine that is full."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine_runs import steady_rate
from overload import goodput
from study import in_turns
from support.bench.runs import outcome
from tidewheel.bench.outcome import Slo
from tidewheel.simulate.lengths import Lengths
from tidewheel.simulate.outcomes import Outcomes
from tidewheel.simulate.traces import synthesise


def test_runs_take_turns_and_the_warm_up_is_left_out() -> None:
    order, numbers = [], itertools.count()

    def run(name: str) -> int:
        order.append(name)
        return next(numbers)

    runs = {name: lambda name=name: run(name) for name in "ab"}
    assert in_turns(runs, 2) == {"a": [2, 5], "b": [3, 4]}
    assert "".join(order) == "baabba"


def test_ramp_up_and_drain_are_no_part_of_the_rate() -> None:
    count = 100
    one = Lengths.parse("constant:1", name="length")
    outcomes = Outcomes(synthesise(count, np.zeros(count), one, one, np.random.default_rng(0)))
    full, drain = 10.0 + 0.5 * np.arange(80), 60.0 + 5.0 * np.arange(20)
    outcomes.last_token[:] = np.random.default_rng(1).permutation([*full, *drain])
    assert steady_rate(outcomes, np.full(count, 3.0)) == pytest.approx(3.0 / 0.5)
    assert 3.0 * count / outcomes.span < 0.5 * steady_rate(outcomes, np.full(count, 3.0))


def test_goodput_counts_what_ends_within_the_objective_after_the_start() -> None:
    outcomes = [outcome(sent=sent, ttft=ttft, tokens=2) for sent, ttft in ((0.0, 0.1), (5.0, 0.1), (6.0, 2.0))]
    assert goodput(outcomes, 10.0, Slo(ttft_s=1.0, tpot_s=1.0)) == pytest.approx(1 / 8.0)
