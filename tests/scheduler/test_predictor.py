"""Output lengths: what is believed when, calibration, forgetting, bounds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.scheduler import estimates
from tidewheel.scheduler.estimates import MIN_SEEN, LengthHistogram, OutputPredictor

LONG = 1 << 20


def feed(outputs: OutputPredictor, tenant: str, prompt: int, lengths: list[int]) -> None:
    for length in lengths:
        outputs.observe(tenant, prompt, length, outputs.predict(tenant, prompt, LONG))


def test_the_prior_holds_until_enough_was_seen() -> None:
    outputs = OutputPredictor(128)
    feed(outputs, "a", 10, [1000] * (int(MIN_SEEN) - 1))
    assert outputs.predict("a", 10, LONG) == 128.0
    feed(outputs, "a", 10, [1000] * 2)
    assert outputs.predict("a", 10, LONG) == pytest.approx(1000, rel=0.1)


def test_the_nearest_cell_that_has_seen_enough_is_asked() -> None:
    outputs = OutputPredictor(128)
    feed(outputs, "a", 10, [20] * 30)
    feed(outputs, "a", 1000, [400] * 60)
    feed(outputs, "b", 1000, [4000] * 200)
    assert outputs.predict("a", 12, LONG) == pytest.approx(20, rel=0.1)  # tenant and prompt length
    assert outputs.predict("a", 100, LONG) == pytest.approx(400, rel=0.1)  # tenant alone
    assert outputs.predict("c", 1000, LONG) == pytest.approx(4000, rel=0.1)  # prompt length alone
    assert outputs.predict("c", 100, LONG) == pytest.approx(4000, rel=0.1)  # everybody


def test_the_answer_is_never_above_max_tokens() -> None:
    outputs = OutputPredictor(128)
    assert outputs.predict("a", 10, 16) == 16.0
    feed(outputs, "a", 10, [1000] * 20)
    assert outputs.predict("a", 10, 50) == 50.0


@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_quantiles_are_calibrated_on_heavy_tailed_lengths(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "QUANTILE", fraction)
    chance, outputs = random.Random(7), OutputPredictor(128)
    below = 0
    for number in range(4000):
        prompt = chance.choice([50, 500])
        length = max(1, round(chance.lognormvariate(4.0 if prompt == 50 else 5.5, 1.0)))
        predicted = outputs.predict("a", prompt, LONG)
        below += number >= 500 and length <= predicted
        outputs.observe("a", prompt, length, predicted)
    assert below / 3500 == pytest.approx(fraction, abs=0.03)


def test_the_error_is_the_mean_distance() -> None:
    outputs = OutputPredictor(100)
    for length in (90, 130, 80, 100):
        outputs.observe("a", 10, length, 100.0)
    assert outputs.mean_abs_error == pytest.approx(15.0)
    assert outputs.num_observed == 4


def test_knowing_the_prompt_length_makes_the_error_smaller() -> None:
    def error(prompts: tuple[int, int]) -> float:
        chance, outputs = random.Random(3), OutputPredictor(128)
        for _ in range(3000):
            kind = chance.randrange(2)
            feed(outputs, "a", prompts[kind], [chance.randint(10, 20) if kind else chance.randint(400, 600)])
        return outputs.mean_abs_error

    assert error((20, 2000)) < 0.3 * error((20, 20))


def test_old_lengths_are_forgotten() -> None:
    outputs = OutputPredictor(128)
    feed(outputs, "a", 10, [50] * 5000)
    feed(outputs, "a", 10, [800] * 80)
    assert outputs.predict("a", 10, LONG) == pytest.approx(800, rel=0.1)


def test_memory_is_bounded_whatever_tenants_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "MAX_CELLS", 50)
    outputs = OutputPredictor(128)
    feed(outputs, "regular", 10, [300] * 20)
    for number in range(500):
        feed(outputs, f"visitor-{number}", 1 << (number % 20), [30])
        assert len(outputs._cells) <= 50
    feed(outputs, "regular", 10, [300] * 9)
    assert outputs.predict("regular", 10, LONG) == pytest.approx(300, rel=0.1)


@given(st.lists(st.integers(1, 1 << 22), min_size=1, max_size=60), st.floats(0.01, 1.0))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_quantile_lies_within_a_bin_of_the_true_one(lengths: list[int], fraction: float) -> None:
    histogram = LengthHistogram()
    for length in lengths:
        histogram.add(length)
    quantile = histogram.quantile(fraction)
    wide = 2.0**0.25
    assert min(min(lengths), 1 << 20) / wide <= quantile <= (max(lengths) + 0.5) * wide
    assert histogram.quantile(1.0) >= quantile >= histogram.quantile(0.01) >= 1.0


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 1 << 20), st.lists(st.integers(1, 5000), max_size=40)
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_prediction_is_a_possible_length(prior: int, most: int, prompt: int, lengths: list[int]) -> None:
    outputs = OutputPredictor(prior)
    feed(outputs, "a", prompt, lengths)
    assert 1.0 <= outputs.predict("a", prompt, most) <= most


def test_a_long_run_does_not_lose_precision() -> None:
    histogram = LengthHistogram()
    for number in range(20_000):  # scales past 1e80 without being made small again
        histogram.add(1 + number % 200)
    assert histogram.num_seen == pytest.approx(100.0, rel=0.01)
    assert histogram.quantile(0.5) == pytest.approx(150, rel=0.1)  # the last hundred: 101 to 200
