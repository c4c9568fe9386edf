"""Days have the published shape."""

from __future__ import annotations

import numpy as np
import pytest

from tidewheel.errors import ConfigError
from tidewheel.workload.day_shapes import (
    CODING,
    CONVERSATION,
    DAY_S,
    DayShape,
    DayVariation,
    daily_arrivals,
    day_arrivals,
)

CALM = DayVariation(level_sigma=0.0, spells_per_day=0.0)


def by_hour(arrivals: np.ndarray, num_days: int) -> np.ndarray:
    return np.histogram(arrivals, bins=np.arange(0, num_days * DAY_S + 1, 3600))[0].reshape(num_days, 24)


@pytest.mark.parametrize(
    ("shape", "ratio", "spread", "median_gap"),
    [(CODING, (8.6, 11.3), 0.72, 0.12), (CONVERSATION, (1.8, 2.2), 0.19, 0.09)],
)
def test_a_day_has_the_published_figures(
    shape: DayShape, ratio: tuple[float, float], spread: float, median_gap: float
) -> None:
    arrivals = day_arrivals(shape, 5.0, 4, np.random.default_rng(0), CALM)
    hours = by_hour(arrivals, 4).mean(axis=0)
    assert ratio[0] < hours.max() / hours.min() < ratio[1]
    assert hours.std() / hours.mean() == pytest.approx(spread, rel=0.1)
    assert len(arrivals) / (4 * DAY_S) == pytest.approx(5.0, rel=0.03)
    gaps = np.diff(arrivals)
    assert np.median(gaps) / gaps.mean() == pytest.approx(median_gap, rel=0.4)
    assert (gaps >= 0).all() and arrivals[0] >= 0 and arrivals[-1] <= 4 * DAY_S


@pytest.mark.parametrize(
    ("shape", "prompt", "output"), [(CODING, (2511, 1930), (23, 8)), (CONVERSATION, (1632, 928), (106, 41))]
)
def test_lengths_have_the_published_mean_and_median(
    shape: DayShape, prompt: tuple[int, int], output: tuple[int, int]
) -> None:
    rng = np.random.default_rng(0)
    for lengths, (mean, median) in ((shape.prompt, prompt), (shape.output, output)):
        drawn = lengths.draw(100_000, rng)
        assert drawn.mean() == pytest.approx(mean, rel=0.03)
        assert np.median(drawn) == pytest.approx(median, rel=0.12)


def test_spells_and_levels_disturb_the_days() -> None:
    unrest = DayVariation(level_sigma=0.2, spells_per_day=5.0)
    calm, wild = (by_hour(day_arrivals(CODING, 3.0, 5, np.random.default_rng(1), u), 5) for u in (CALM, unrest))
    assert wild.sum(axis=1).std() > 3 * calm.sum(axis=1).std()


def test_as_many_arrivals_as_are_asked_for() -> None:
    arrivals = daily_arrivals(17_280, 0.1, np.random.default_rng(0))
    assert len(arrivals) == 17_280
    assert arrivals[-1] == pytest.approx(2 * DAY_S, rel=0.1)
    assert (np.diff(arrivals) >= 0).all()


def test_centuries_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the arrivals take .* days: it must be 1 to 400"):
        daily_arrivals(2000, 1e-5, np.random.default_rng(0))
