"""Days of traffic with the shape of published traces.

A week of a coding and of a conversation service: Azure LLM inference traces, May 2024 (Stojkovic and others,
DynamoLLM, HPCA 2025; AzurePublicDataset on GitHub). Their weekdays, as analysed in
ctdunlap32/data-center-flexibility-resource-adequacy on GitHub:

                                        coding        conversation
    busiest hour over quietest hour     8.6 to 11.3   1.8 to 2.2
    standard deviation over mean, hours 0.72          0.19
    requests per second, mean           27.8          45.1
    prompt tokens: mean, median, most   2511, 1930, 7743    1632, 928, 7999
    output tokens: mean, median, most   23, 8, 5000         106, 41, 1500
    gaps of arrivals: median over mean  0.12          0.09

Gamma gaps with 5 times Poisson's variance fit the last line. The strength of days and bursts is assumed.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.workload.arrivals import FloatArray, bursty_arrivals
from tidewheel.workload.lengths import Lengths

DAY_S = 86_400.0
GAP_BURSTINESS = 5.0
_GRID_S = 10.0
MAX_DAYS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class DayShape:
    """Relative request rate over a day: a raised cosine to the power of `sharpness`."""

    name: str
    peak_over_trough: float
    sharpness: float
    peak_hour: float = 18.0  # 19 or 20 hours UTC are noon on the west coast of the USA
    requests_per_s: float  # mean
    prompt: Lengths
    output: Lengths

    def rate(self, seconds: FloatArray) -> FloatArray:
        day = self._curve(np.arange(0, DAY_S, _GRID_S))
        return np.asarray(self._curve(seconds) / day.mean())

    def _curve(self, seconds: FloatArray) -> FloatArray:
        cosine = np.cos(2 * np.pi * (seconds / DAY_S - self.peak_hour / 24))
        return np.asarray(1 + (self.peak_over_trough - 1) * ((1 + cosine) / 2) ** self.sharpness)


CODING = DayShape(
    name="coding",
    peak_over_trough=10.0,
    sharpness=1.8,
    requests_per_s=27.8,
    prompt=Lengths("lognormal", 2511, 1.0, 7743),
    output=Lengths("lognormal", 23, 1.45, 5000),
)
CONVERSATION = DayShape(
    name="conversation",
    peak_over_trough=2.0,
    sharpness=0.5,
    requests_per_s=45.1,
    prompt=Lengths("lognormal", 1632, 1.06, 7999),
    output=Lengths("lognormal", 106, 1.38, 1500),
)
DAY_SHAPES = {shape.name: shape for shape in (CODING, CONVERSATION)}


class TrafficBurst(NamedTuple):
    begin: float
    seconds: float
    factor: float


class DayVariation(NamedTuple):
    level_sigma: float = 0.05  # of the logarithm of a day's level
    spells_per_day: float = 3.0
    mean_spell_s: float = 600.0
    most_factor: float = 2.0  # of a burst; the least is 1.25


def day_arrivals(
    shape: DayShape,
    rate: float,
    num_days: int,
    rng: np.random.Generator,
    unrest: DayVariation = DayVariation(),  # noqa: B008 - immutable
) -> FloatArray:
    """Return arrival times in seconds, at a mean `rate` per second: gamma gaps, denser where the day is busier."""
    grid = _grid(num_days)
    relative = shape.rate(grid)
    days = np.minimum(grid // DAY_S, num_days - 1).astype(int)
    relative *= rng.lognormal(0, unrest.level_sigma, num_days)[days]
    for spell in _spells(num_days, unrest, rng):
        relative[(grid >= spell.begin) & (grid < spell.begin + spell.seconds)] *= spell.factor
    passed = _passed(relative)
    count = round(rate * passed[-1] * 1.05) + 100
    even = bursty_arrivals(count, rate, rng, burstiness=GAP_BURSTINESS)
    return np.interp(even[even < passed[-1]], passed, grid)


def daily_arrivals(count: int, rate: float, rng: np.random.Generator) -> FloatArray:
    """Return arrival times in seconds from midnight, in the coding service's daily shape, without variation."""
    even = bursty_arrivals(count, rate, rng, burstiness=GAP_BURSTINESS)
    grid = _grid(math.ceil(even[-1] / DAY_S))
    return np.interp(even, _passed(CODING.rate(grid)), grid)


def _grid(num_days: int) -> FloatArray:
    if not 1 <= num_days <= MAX_DAYS:
        raise ConfigError(f"the arrivals take {num_days} days: it must be 1 to {MAX_DAYS}")
    return np.arange(0, num_days * DAY_S + _GRID_S / 2, _GRID_S)


def _passed(relative: FloatArray) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum((relative[1:] + relative[:-1]) / 2 * _GRID_S)))


def _spells(num_days: int, unrest: DayVariation, rng: np.random.Generator) -> list[TrafficBurst]:
    count = rng.poisson(unrest.spells_per_day * num_days)
    begins = rng.uniform(0, num_days * DAY_S, count)
    seconds = rng.exponential(unrest.mean_spell_s, count)
    factors = rng.uniform(1.25, unrest.most_factor, count)
    return [TrafficBurst(*values) for values in zip(begins.tolist(), seconds.tolist(), factors.tolist(), strict=True)]
