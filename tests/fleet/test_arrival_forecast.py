"""The forecast: finds a day's profile and a trend, tells when it is off, and then has no say."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.fleet import scaling_policies
from tidewheel.fleet.scaling import FleetState, ReplicaReport, ScalingSettings
from tidewheel.fleet.scaling_policies import (
    BUCKET_S,
    ArrivalBuckets,
    ArrivalForecast,
    PredictiveScaling,
    ReactiveScaling,
)
from tidewheel.simulate.fleet_choice import bucket_counts

BUCKETS = 288
TOKENS, CAPACITY = 100, 1000.0
SCALING = ScalingSettings(max_replicas=50, replica_tokens_per_s=CAPACITY, startup_s=600)


def day(level: float = 1000.0) -> list[float]:
    return [level * (1.1 + math.sin(2 * math.pi * bucket / BUCKETS)) for bucket in range(BUCKETS)]


def forecast(*days: list[float], lead: int = 1) -> ArrivalForecast:
    made = ArrivalForecast(lead=lead)
    for counts in days:
        made.learn(counts)
    return made


def test_nothing_is_forecast_before_a_season_has_passed() -> None:
    made = forecast(day()[:-1])
    assert not made.is_ready and not made.is_reliable
    made.learn([1000.0])
    assert made.is_ready and not made.is_reliable


@pytest.mark.parametrize("ahead", [1, 12, 72, 200])
def test_a_repeated_day_is_forecast(ahead: int) -> None:
    made = forecast(day(), day(), day())
    assert made.is_reliable and made.error < 0.02
    assert made.ahead(ahead) == pytest.approx(day()[ahead - 1], rel=0.05, abs=10)


def test_the_level_follows_a_busier_day_within_an_hour() -> None:
    made = forecast(day(), day(), [1.5 * count for count in day()[:12]])
    assert made.ahead(12) == pytest.approx(1.5 * day()[23], rel=0.15)


def test_a_trend_is_carried_on_and_dies_down() -> None:
    rising = [count * (1 + index / BUCKETS) for index, count in enumerate(day())]
    flat, made = forecast(day(), day()), forecast(day(), rising[:144])
    assert made.ahead(6) / day()[149] > 1.45
    assert made.ahead(200) < 3 * flat.ahead(56)


def test_forecasts_are_judged_at_the_lead_they_are_used_with() -> None:
    """Counts that jump up and down each bucket: one bucket ahead is always wrong, the profile of two days right."""
    step = [2000.0 if (bucket // 3) % 2 else 200.0 for bucket in range(BUCKETS)]
    surprised = forecast(day(), day(), step[:60])
    assert surprised.error > 0.3 and not surprised.is_reliable
    near, far = (forecast(day(), day(), [c * 3 for c in day()[:8]], lead=lead) for lead in (1, 6))
    assert near.error < far.error


@given(st.lists(st.floats(0, 1e6), min_size=BUCKETS, max_size=3 * BUCKETS), st.integers(1, 400))
def test_forecasts_are_finite_and_not_negative(counts: list[float], ahead: int) -> None:
    made = forecast(counts)
    assert 0 <= made.ahead(ahead) < math.inf
    assert made.error >= 0


@given(st.lists(st.tuples(st.floats(0.01, 2000), st.integers(0, 500)), min_size=1, max_size=50))
def test_buckets_lose_no_arrival(reads: list[tuple[float, int]]) -> None:
    buckets, now, count, found = ArrivalBuckets(), 0.0, 0, 0.0
    buckets.add(0.0, 0)
    for seconds, more in reads:
        now, count = now + seconds, count + more
        found += sum(buckets.add(now, count))
    rest = buckets.add(now + 300, count)
    assert found + sum(rest) == pytest.approx(count)


def test_recorded_arrivals_fill_whole_seasons() -> None:
    counts = bucket_counts([0.0, 299.0, 300.0, 86_400.0])
    assert len(counts) == 2 * BUCKETS
    assert counts[:3] == [2, 1, 0] and counts[BUCKETS] == 1 and sum(counts) == 4
    assert bucket_counts([]) == []


def run(policy: PredictiveScaling | ReactiveScaling, counts: list[float], begin: int = 0) -> list[int]:
    """Return the number after each bucket, for a fleet that computes all that is asked."""
    numbers, arrivals, number = [], 0, 3
    for index, count in enumerate(counts):
        for part in range(1, 21):
            arrivals += round(count * part / 20) - round(count * (part - 1) / 20)
            rate = count / BUCKET_S * TOKENS / number
            ready = tuple(ReplicaReport(name=str(name), running=1, tokens_per_s=rate) for name in range(number))
            now = (begin + index + part / 20) * BUCKET_S
            number = policy.decide(FleetState(now=now, ready=ready, num_arrivals=arrivals))
        numbers.append(number)
    return numbers


def needed(count: float) -> int:
    return math.ceil(count / BUCKET_S * TOKENS / CAPACITY / 0.7 - 1e-9)


def test_replicas_are_asked_for_before_they_are_needed() -> None:
    """While arrivals rise, those of the time to start a replica later are planned for."""
    counts = day(9000)
    history = counts * 3
    ahead, now = (
        run(PredictiveScaling(SCALING, history), counts[:60]),
        run(ReactiveScaling(SCALING), counts[:60]),
    )
    late = [index for index in range(10, 56) if ahead[index] < needed(counts[index + 2])]
    assert late == []
    assert sum(now[index] < needed(counts[index + 2]) for index in range(10, 56)) > 3


def test_replicas_go_sooner_while_the_forecast_is_trusted() -> None:
    counts, patient = day(9000), dataclasses.replace(SCALING, scale_down_after_s=7200)
    ahead, now = PredictiveScaling(patient, counts * 3), ReactiveScaling(patient)
    assert sum(run(ahead, counts)[72:216]) < sum(run(now, counts)[72:216])


def test_a_forecast_that_is_off_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holiday: a fifth of the arrivals. Once the error is known, the decisions are those of the reactive policy."""
    counts = [count / 5 for count in day(9000)]
    predictive, trusting = (PredictiveScaling(SCALING, day(9000) * 3) for _ in range(2))
    for name in ("LEVEL_WEIGHT", "TREND_WEIGHT", "SEASON_WEIGHT"):
        monkeypatch.setattr(scaling_policies, name, 0.0)
    found, expected = run(predictive, counts), run(ReactiveScaling(SCALING), counts)
    assert not predictive.forecast.is_reliable
    assert found[12:] == expected[12:]
    monkeypatch.setattr(scaling_policies, "ERROR_LIMIT", 100.0)
    assert sum(run(trusting, counts)) > 2 * sum(expected)


def test_without_history_it_is_the_reactive_policy_for_a_day() -> None:
    counts = day(9000)
    assert run(PredictiveScaling(SCALING), counts) == run(ReactiveScaling(SCALING), counts)
