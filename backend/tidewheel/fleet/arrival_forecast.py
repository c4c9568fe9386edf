"""Forecast of arrivals by the time of day.

Holt-Winters smoothing (Winters, Management Science 6(3), 1960), with multiplicative season and damped trend (Gardner
and McKenzie, Management Science 31(10), 1985).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_LEAST = 1e-3  # of factors and levels: keeps quiet nights finite


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastSettings:
    bucket_s: float = 300.0
    season_s: float = 86_400.0  # whole buckets
    level_weight: float = 0.3  # of the newest bucket
    trend_weight: float = 0.05
    season_weight: float = 0.3  # of the newest day
    damping: float = 0.9  # of the trend, per bucket
    error_buckets: int = 6
    error_limit: float = 0.3  # share of the arrivals

    @property
    def num_buckets(self) -> int:
        return round(self.season_s / self.bucket_s)


class ArrivalForecast:
    """Forecast of request arrivals per bucket of time, ready after one season (a day)."""

    def __init__(self, settings: ForecastSettings, *, lead: int = 1) -> None:
        """`lead`: how many buckets ahead the forecast error is measured."""
        self._settings = settings
        self._lead = lead
        self._first: list[float] = []
        self._season: list[float] = []
        self._level, self._trend = 0.0, 0.0
        self._next = 0
        self._made: deque[float] = deque(maxlen=lead)
        self._errors: deque[tuple[float, float]] = deque(maxlen=settings.error_buckets)  # (error, arrivals)

    @property
    def is_ready(self) -> bool:
        return bool(self._season)

    @property
    def error(self) -> float:
        """Sum of recent absolute errors over the sum of arrivals; infinite before enough forecasts."""
        if len(self._errors) < self._settings.error_buckets:
            return math.inf
        errors = sum(error for error, _ in self._errors)
        return errors / max(sum(count for _, count in self._errors), 1.0)

    @property
    def is_reliable(self) -> bool:
        return self.error <= self._settings.error_limit

    def ahead(self, buckets: int) -> float:
        """Return the arrivals expected in a future bucket (1: the next). Raise `ValueError` unless `is_ready`."""
        if not self.is_ready:
            raise ValueError("no forecast before the first season has passed")
        damping = self._settings.damping
        trend = self._trend * math.fsum(math.pow(damping, step) for step in range(1, buckets + 1))
        factor = self._season[(self._next + buckets - 1) % self._settings.num_buckets]
        return max(self._level + trend, 0.0) * factor

    def learn(self, counts: Iterable[float]) -> None:
        for count in counts:
            if not self.is_ready:
                self._begin(count)
                continue
            if len(self._made) == self._lead:
                self._errors.append((abs(self._made[0] - count), count))
            self._smooth(count)
            self._next += 1
            self._made.append(self.ahead(self._lead))

    def _begin(self, count: float) -> None:
        first = self._first
        first.append(count)
        self._next = num = len(first)
        if num == self._settings.num_buckets:
            self._level = max(sum(first) / num, _LEAST)
            means = [(first[index - 1] + first[index] + first[(index + 1) % num]) / 3 for index in range(num)]
            self._season = [max(mean / self._level, _LEAST) for mean in means]

    def _smooth(self, count: float) -> None:
        settings, index = self._settings, self._next % self._settings.num_buckets
        before, factor = self._level, self._season[index]
        expected = before + settings.damping * self._trend
        self._level = max(expected + settings.level_weight * (count / factor - expected), _LEAST)
        self._trend = (
            settings.trend_weight * (self._level - before)
            + (1 - settings.trend_weight) * settings.damping * self._trend
        )
        self._season[index] = max(factor + settings.season_weight * (count / self._level - factor), _LEAST)


class ArrivalBuckets:
    """Arrivals per bucket of time, from an irregularly read counter."""

    def __init__(self, bucket_s: float) -> None:
        self._bucket_s = bucket_s
        self._last: tuple[float, int] | None = None
        self._end = 0.0
        self._count = 0.0

    def add(self, now: float, num_arrivals: int) -> list[float]:
        """Return the arrivals of each bucket that has ended since the last call."""
        if self._last is None:
            self._last, self._end = (now, num_arrivals), now + self._bucket_s
            return []
        time, before = self._last
        rate = max(num_arrivals - before, 0) / (now - time) if now > time else 0.0
        done = []
        while self._end <= now:
            done.append(self._count + rate * (self._end - time))
            time, self._count = self._end, 0.0
            self._end += self._bucket_s
        self._count += rate * (now - time)
        self._last = (now, num_arrivals)
        return done


def bucket_counts(arrivals: Sequence[float], settings: ForecastSettings) -> list[float]:
    """Return arrivals per bucket, for whole seasons. `arrivals`: seconds from the first season's start."""
    if not len(arrivals):
        return []
    num_buckets = math.ceil((max(arrivals) + 1e-9) / settings.season_s) * settings.num_buckets
    buckets = (np.asarray(arrivals) / settings.bucket_s).astype(np.intp)
    return [float(count) for count in np.bincount(buckets, minlength=num_buckets)]
