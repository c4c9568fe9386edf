"""What the studies share."""

from __future__ import annotations

import itertools

import pytest

from common.study import in_turns
from path.overload import goodput
from support.bench.runs import outcome
from tidewheel.bench.outcome import Slo


def test_runs_take_turns_and_the_warm_up_is_left_out() -> None:
    order, numbers = [], itertools.count()

    def run(name: str) -> int:
        order.append(name)
        return next(numbers)

    runs = {name: lambda name=name: run(name) for name in "ab"}
    assert in_turns(runs, 2) == {"a": [2, 5], "b": [3, 4]}
    assert "".join(order) == "baabba"


def test_goodput_counts_what_ends_within_the_objective_after_the_start() -> None:
    outcomes = [outcome(sent=sent, ttft=ttft, tokens=2) for sent, ttft in ((0.0, 0.1), (5.0, 0.1), (6.0, 2.0))]
    assert goodput(outcomes, 10.0, Slo(ttft_s=1.0, tpot_s=1.0)) == pytest.approx(1 / 8.0)
