"""When requests are sent."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from tidewheel.bench import BenchError
from tidewheel.bench.arrivals import LoadPattern, parse_loads

SECONDS = 2000.0


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    times = LoadPattern("poisson", 5.0).times(SECONDS, seed=1)
    assert len(times) / SECONDS == pytest.approx(5.0, rel=0.03)
    between = gaps(times)
    # Of an exponential distribution the standard deviation is the mean.
    assert statistics.stdev(between) == pytest.approx(statistics.fmean(between), rel=0.05)


def test_bursts_have_the_rate_and_gaps_that_vary_as_asked() -> None:
    times = LoadPattern("burst", 5.0, burstiness=9.0).times(SECONDS, seed=1)
    assert len(times) / SECONDS == pytest.approx(5.0, rel=0.1)
    between = gaps(times)
    assert (statistics.stdev(between) / statistics.fmean(between)) ** 2 == pytest.approx(9.0, rel=0.15)


@pytest.mark.parametrize("kind", ["poisson", "burst"])
def test_times_rise_within_the_run_and_come_from_the_seed(kind: str) -> None:
    load = LoadPattern(kind, 50.0)
    times = load.times(10.0, seed=3)
    assert times == sorted(times)
    assert times[0] >= 0.0
    assert times[-1] < 10.0
    assert times == load.times(10.0, seed=3)
    assert times != load.times(10.0, seed=4)


def test_texts_and_what_they_mean() -> None:
    assert parse_loads("closed:8", 10.0) == [LoadPattern("closed", 8)]
    assert parse_loads("poisson:2.5", 10.0) == [LoadPattern("poisson", 2.5)]
    assert parse_loads("burst:2:16", 10.0) == [LoadPattern("burst", 2.0, 16.0)]
    assert parse_loads("trace", 10.0) == [LoadPattern("trace", 1.0)]
    assert parse_loads("all", 10.0) == [LoadPattern("all")]
    assert [load.value for load in parse_loads("ramp:1:5:5", 10.0)] == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("poisson", "write closed:N"),
        ("poisson:fast", "write closed:N"),
        ("sine:3", "write closed:N"),
        ("closed:1:2", "write closed:N"),
        ("poisson:0", "must be above 0"),
        ("poisson:-1", "must be above 0"),
        ("poisson:nan", "must be above 0"),
        ("poisson:inf", "must be above 0"),
        ("poisson:200000", "100000 at most"),
        ("poisson:90000", "1,000,000 at most"),
        ("burst:5:0.5", "1 (Poisson) to 1000"),
        ("closed:0", "no whole number"),
        ("closed:2.5", "no whole number"),
        ("ramp:5:1", "must rise"),
        ("ramp:1:5:2", "at least 3 steps"),
        ("trace:0", "above 0"),
    ],
)
def test_impossible_loads_are_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(BenchError) as refusal:
        parse_loads(text, 100.0)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
