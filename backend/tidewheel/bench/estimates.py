import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Student's t, 97.5 %, by degrees of freedom; then the normal's.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_T_LIMIT = 1.96
_RESAMPLES = 1000


class Estimate(NamedTuple):
    """Mean with a 95 % confidence interval; NaN if unknown."""

    mean: float
    low: float
    high: float


UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def quantile(values: Sequence[float], q: float) -> float:
    """Return the nearest-rank quantile; NaN if empty."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)] if values else math.nan


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def t_interval(samples: Sequence[float]) -> Estimate:
    """Return the mean with Student's 95 % interval, NaN left out."""
    seen = [value for value in samples if not math.isnan(value)]
    if not seen:
        return UNKNOWN
    centre = statistics.fmean(seen)
    if len(seen) == 1:
        return Estimate(centre, math.nan, math.nan)
    freedom = len(seen) - 1
    factor = _T[freedom - 1] if freedom <= len(_T) else _T_LIMIT
    half = factor * statistics.stdev(seen) / math.sqrt(len(seen))
    return Estimate(centre, centre - half, centre + half)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return the geometric mean ratio of pairs, in which drift cancels. Pairs with 0 or NaN are skipped."""
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True) if a > 0 and b > 0]
    centre, low, high = t_interval(logs)
    return Estimate(math.exp(centre), math.exp(low), math.exp(high))


def bootstrap_quantiles(values: Sequence[float], quantiles: Sequence[float], *, seed: int = 0) -> list[Estimate]:
    """Return quantiles with 95 % percentile bootstrap intervals (Efron, 1979)."""
    if not values:
        return [UNKNOWN] * len(quantiles)
    sample, rng = np.sort(np.asarray(values, dtype=np.float64)), np.random.default_rng(seed)
    ranks = [max(0, math.ceil(q * len(sample)) - 1) for q in quantiles]
    drawn = np.sort(rng.integers(0, len(sample), (_RESAMPLES, len(sample))), axis=1)[:, ranks]
    low, high = np.quantile(sample[drawn], (0.025, 0.975), axis=0)
    return [Estimate(float(sample[r]), float(a), float(b)) for r, a, b in zip(ranks, low, high, strict=True)]


def jain(shares: Sequence[float]) -> float:
    """Return Jain's fairness index (Jain, Chiu, Hawe, 1984): 1/n to 1."""
    squares = sum(share * share for share in shares)
    if not squares:
        return math.nan
    return sum(shares) ** 2 / (len(shares) * squares)


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of `successes / count` (Wilson, 1927)."""
    if not count:
        return 0.0, 1.0
    share, z2 = successes / count, _T_LIMIT**2
    centre = share + z2 / (2 * count)
    half = _T_LIMIT * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return (centre - half) / (1 + z2 / count), (centre + half) / (1 + z2 / count)
