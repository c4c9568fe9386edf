"""Arrival times, in seconds from the start."""

import random
from itertools import accumulate, repeat, takewhile

import numpy as np
import numpy.typing as npt

from tidewheel.errors import ConfigError

FloatArray = npt.NDArray[np.float64]


def poisson_arrivals(count: int, rate: float, rng: np.random.Generator) -> FloatArray:
    _check_rate(rate)
    return np.asarray(np.cumsum(rng.exponential(1 / rate, count)))


def poisson_until(seconds: float, rate: float, rng: random.Random) -> list[float]:
    """Return Poisson arrivals before `seconds`. Keep the draws: recorded measurements used them."""
    _check_rate(rate)
    return list(takewhile(lambda at: at < seconds, accumulate(map(rng.expovariate, repeat(rate)))))


def bursty_arrivals(count: int, rate: float, rng: np.random.Generator, *, burstiness: float = 4.0) -> FloatArray:
    """Return arrivals with gamma gaps, whose variance is `burstiness` times Poisson's."""
    _check_rate(rate)
    if not 0.1 <= burstiness <= 1000:
        raise ConfigError(f"burstiness is {burstiness:g}: it must be 0.1 to 1000")
    return np.asarray(np.cumsum(rng.gamma(1 / burstiness, burstiness / rate, count)))


def switching_arrivals(
    count: int,
    rate: float,
    rng: np.random.Generator,
    *,
    ratio: float = 8.0,
    busy_share: float = 0.2,
    mean_busy_s: float = 5.0,
) -> FloatArray:
    """Return arrivals of a two-state Markov modulated Poisson process (Fischer, Meier-Hellstern, 1993).

    Busy spells take `busy_share` of the time, at `ratio` times the calm rate.
    """
    _check_rate(rate)
    calm_rate = rate / (1 - busy_share + ratio * busy_share)
    rates = (calm_rate, ratio * calm_rate)
    mean_spells = (mean_busy_s * (1 - busy_share) / busy_share, mean_busy_s)
    arrivals: list[FloatArray] = []
    now, num_drawn, state = 0.0, 0, 0
    while num_drawn < count:
        spell = float(rng.exponential(mean_spells[state]))
        times = now + spell * np.sort(rng.random(rng.poisson(rates[state] * spell)))
        arrivals.append(times)
        num_drawn += len(times)
        now += spell
        state = 1 - state
    return np.concatenate(arrivals)[:count]


def _check_rate(rate: float) -> None:
    if not (np.isfinite(rate) and rate > 0):
        raise ConfigError(f"rate is {rate:g}: it must be above 0 requests per second")
