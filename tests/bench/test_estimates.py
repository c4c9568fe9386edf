"""Statistics against values from textbooks and from definitions."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.bench.estimates import bootstrap_quantiles, jain, quantile, ratio_interval, t_interval, wilson_interval


def test_a_quantile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    random.Random(0).shuffle(values)
    assert [quantile(values, q) for q in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert quantile([7.0], 0.01) == 7.0
    assert math.isnan(quantile([], 0.5))


def test_the_t_interval_of_a_known_sample() -> None:
    # Mean 3, standard deviation sqrt(2.5), 4 degrees of freedom: 3 ± 2.776 * sqrt(2.5 / 5).
    estimate = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert estimate.mean == 3.0
    assert estimate.high - 3.0 == pytest.approx(2.776 * math.sqrt(0.5))
    assert 3.0 - estimate.low == pytest.approx(estimate.high - 3.0)


def test_one_repeat_has_a_mean_and_no_interval() -> None:
    estimate = t_interval([4.0, math.nan])
    assert estimate.mean == 4.0
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


def test_the_t_interval_holds_what_it_promises() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(2000):
        estimate = t_interval([rng.gauss(10.0, 3.0) for _ in range(4)])
        held += estimate.low <= 10.0 <= estimate.high
    assert 0.94 <= held / 2000 <= 0.96


def test_paired_ratios_do_not_see_a_machine_that_drifts() -> None:
    theirs = [10.0, 20.0, 40.0]
    ratio = ratio_interval([3.0 * value for value in theirs], theirs)
    assert ratio.mean == pytest.approx(3.0)
    assert ratio.low == pytest.approx(3.0)
    assert ratio.high == pytest.approx(3.0)


def test_no_ratio_to_nothing() -> None:
    assert math.isnan(ratio_interval([1.0, 2.0], [0.0, 0.0]).mean)


def test_bootstrap_quantiles_are_those_of_the_sample_and_their_intervals_hold_the_truth() -> None:
    rng = random.Random(2)
    held = 0
    for trial in range(200):
        values = [rng.expovariate(1.0) for _ in range(300)]
        (median, p95) = bootstrap_quantiles(values, (0.5, 0.95), seed=trial)
        assert median.mean == quantile(values, 0.5)
        assert p95.mean == quantile(values, 0.95)
        held += median.low <= math.log(2) <= median.high
    assert 0.90 <= held / 200 <= 0.99


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=30))
def test_jain_lies_between_one_nth_and_one(shares: list[float]) -> None:
    assert 1 / len(shares) - 1e-9 <= jain(shares) <= 1 + 1e-9


def test_jain_of_known_shares() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    # Jain's own example: 4 users, 2 of whom get all: half are treated fairly.
    assert jain([1.0, 1.0, 0.0, 0.0]) == pytest.approx(0.5)
    assert math.isnan(jain([0.0, 0.0]))


def test_the_wilson_interval_of_known_shares() -> None:
    # Newcombe (1998), table I: 81 of 263, and 0 of 20.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 500), st.data())
def test_a_wilson_interval_holds_its_share_and_mirrors(count: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, count))
    low, high = wilson_interval(successes, count)
    assert -1e-9 <= low <= successes / count + 1e-9
    assert successes / count - 1e-9 <= high <= 1 + 1e-9
    assert wilson_interval(count - successes, count) == pytest.approx((1 - high, 1 - low))


def test_means_agree_with_the_standard_library() -> None:
    values = [random.Random(3).random() for _ in range(10)]
    assert t_interval(values).mean == pytest.approx(statistics.fmean(values))
