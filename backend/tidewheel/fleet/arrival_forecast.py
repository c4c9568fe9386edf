"""Holt-Winters forecast of arrivals (Winters, Management Science 6(3), 1960).

Multiplicative season and damped trend (Gardner and McKenzie, Management Science 31(10), 1985).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

BUCKET_S = 300.0
NUM_BUCKETS = 288  # of a season, a day
LEVEL_WEIGHT = 0.3  # of the newest bucket
TREND_WEIGHT = 0.05
SEASON_WEIGHT = 0.3  # of the newest day
DAMPING = 0.9  # of the trend, per bucket
ERROR_BUCKETS = 6
ERROR_LIMIT = 0.3  # share of the arrivals
_LEAST = 1e-3  # of factors and levels: keeps quiet nights finite


class ArrivalForecast:
    """Forecast of request arrivals per bucket of time, ready after one season (a day)."""

    def __init__(self, *, lead: int = 1) -> None:
        """`lead`: how many buckets ahead the forecast error is measured."""
        self._lead = lead
        self._first: list[float] = []
        self._season: list[float] = []
        self._level, self._trend = 0.0, 0.0
        self._next = 0
        self._made: deque[float] = deque(maxlen=lead)
        self._errors: deque[tuple[float, float]] = deque(maxlen=ERROR_BUCKETS)  # (error, arrivals)

    @property
    def is_ready(self) -> bool:
        return bool(self._season)

    @property
    def error(self) -> float:
        """Summed absolute error of the last `ERROR_BUCKETS` forecasts, over their arrivals; infinite with fewer."""
        if len(self._errors) < ERROR_BUCKETS:
            return math.inf
        errors = sum(error for error, _ in self._errors)
        return errors / max(sum(count for _, count in self._errors), 1.0)

    @property
    def is_reliable(self) -> bool:
        return self.error <= ERROR_LIMIT

    def ahead(self, buckets: int) -> float:
        """Return the arrivals expected in a future bucket (1: the next), once the forecast is ready."""
        trend = self._trend * math.fsum(math.pow(DAMPING, step) for step in range(1, buckets + 1))
        factor = self._season[(self._next + buckets - 1) % NUM_BUCKETS]
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
        if num == NUM_BUCKETS:
            self._level = max(sum(first) / num, _LEAST)
            means = [(first[index - 1] + first[index] + first[(index + 1) % num]) / 3 for index in range(num)]
            self._season = [max(mean / self._level, _LEAST) for mean in means]

    def _smooth(self, count: float) -> None:
        index = self._next % NUM_BUCKETS
        before, factor = self._level, self._season[index]
        expected = before + DAMPING * self._trend
        self._level = max(expected + LEVEL_WEIGHT * (count / factor - expected), _LEAST)
        self._trend = TREND_WEIGHT * (self._level - before) + (1 - TREND_WEIGHT) * DAMPING * self._trend
        self._season[index] = max(factor + SEASON_WEIGHT * (count / self._level - factor), _LEAST)


class ArrivalBuckets:
    """Arrivals per bucket of time, from an irregularly read counter."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self._end = 0.0
        self._count = 0.0

    def add(self, now: float, num_arrivals: int) -> list[float]:
        """Take a reading of the counter. Return the arrivals of each bucket that has ended since the last one."""
        if self._last is None:
            self._last, self._end = (now, num_arrivals), now + BUCKET_S
            return []
        time, before = self._last
        rate = max(num_arrivals - before, 0) / (now - time) if now > time else 0.0
        done = []
        while self._end <= now:
            done.append(self._count + rate * (self._end - time))
            time, self._count = self._end, 0.0
            self._end += BUCKET_S
        self._count += rate * (now - time)
        self._last = (now, num_arrivals)
        return done
