"""Series on Triton's `/metrics`, each sent what is new of a total.

Each call of a metric is a round trip (20 to 60 µs, measured), so only differences of totals are sent. A histogram
takes one value a call, at most `MAX_OBSERVATIONS` in a flush; others follow when no request is live. Front ends share
series of equal name and labels, whose differences add up. A metric lives until its process ends: if it is deleted,
the server removes the series under other front ends that write to it (2.51 then hangs).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tidewheel.adapter.metric_families import Labels
from tidewheel.stats import Histogram

MAX_OBSERVATIONS = 64  # per histogram and flush: 160 a second
MAX_WAITING = 1024  # values of a histogram, for later flushes
MAX_RESTING = 1 << 16  # more, for a time without live requests
_ROUNDING = 1e-6  # of sums of shares


class Gauge:
    def __init__(self, family: Any, labels: Labels) -> None:
        self._metric = _for_good(family.Metric(labels=dict(labels)))
        self._value: float | None = None

    def set(self, value: float) -> None:
        if value != self._value:
            self._metric.set(value)
            self._value = value

    def forget(self) -> None:
        """Send the next value in any case."""
        self._value = None


class Counter:
    """Growing total. A smaller one comes from a restarted process."""

    def __init__(self, family: Any, labels: Labels) -> None:
        self._metric = _for_good(family.Metric(labels=dict(labels)))
        self._total = 0.0

    def advance(self, total: float) -> None:
        difference = total - self._total if total >= self._total else total
        if difference > 0:
            self._metric.increment(difference)
        self._total = total

    def follow(self, total: float) -> None:
        """Skip what others have published."""
        self._total = total


class CounterByLabel:
    """Counters that differ in one label."""

    def __init__(self, family: Any, labels: Labels, label: str, values: Sequence[str] = ()) -> None:
        self._family = family
        self._labels = labels
        self._label = label
        self._counters: dict[str, Counter] = {}
        for value in values:
            self._counter(value)

    def advance(self, totals: Mapping[str, float]) -> None:
        for value, total in totals.items():
            self._counter(value).advance(total)

    def follow(self, totals: Mapping[str, float]) -> None:
        for value, total in totals.items():
            self._counter(value).follow(total)

    def _counter(self, value: str) -> Counter:
        if value not in self._counters:
            self._counters[value] = Counter(self._family, {**self._labels, self._label: value})
        return self._counters[value]


class HistogramSeries:
    """Histogram that grows by the differences of one counted here.

    A value stands for its bucket: the mean of the bucket's values that wait, so that the sum is right. At most
    `MAX_OBSERVATIONS` go out at once. At most `MAX_WAITING` wait for the next times, a share of each bucket's new
    ones, so that what is shown is fresh. The others rest until there is time, at most `MAX_RESTING`, of more a share.
    """

    def __init__(self, name: str, description: str, bounds: Sequence[float], labels: Labels) -> None:
        family = pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.HISTOGRAM)
        self._metric = _for_good(_for_good(family).Metric(labels=dict(labels), buckets=list(bounds)))
        self._seen = Histogram(tuple(bounds))
        self._waiting, self._resting = (np.zeros((2, len(self._seen.counts))) for _ in range(2))  # counts, sums

    def advance(self, now: Histogram, *, has_time: bool = False) -> bool:
        """Return whether values are left."""
        self._take(now)
        if has_time:
            self._wake()
        num_waiting = self._num_waiting
        if num_waiting < 1.0 - _ROUNDING:
            return False
        share = min(1.0, MAX_OBSERVATIONS / num_waiting)
        for bucket, count in enumerate(self._waiting[0].tolist()):
            self._observe(bucket, int(share * count + _ROUNDING))
        return share < 1.0 or bool(self._resting[0].sum() >= 1.0 - _ROUNDING)

    def follow(self, now: Histogram) -> None:
        """Skip what others have published."""
        self._seen = now.copy()

    def _take(self, now: Histogram) -> None:
        seen = self._seen
        if now.counts == seen.counts:
            return
        if sum(now.counts) <= sum(seen.counts):  # of a restarted process
            seen = Histogram(now.bounds)
        self.follow(now)
        new = np.array([now.counts, now.sums]) - [seen.counts, seen.sums]
        share = min(1.0, self._room / max(new[0].sum(), 1.0))
        self._waiting += share * new
        if share < 1.0:
            self._resting += (1.0 - share) * new
            self._resting *= min(1.0, MAX_RESTING / self._resting[0].sum())

    def _wake(self) -> None:
        num_resting = float(self._resting[0].sum())
        if num_resting:
            share = min(1.0, self._room / num_resting)
            self._waiting += share * self._resting
            self._resting *= 1.0 - share

    @property
    def _num_waiting(self) -> float:
        return float(self._waiting[0].sum())

    @property
    def _room(self) -> float:
        return max(MAX_WAITING - self._num_waiting, 0.0)

    def _observe(self, bucket: int, num_values: int) -> None:
        if not num_values:
            return
        bounds = self._seen.bounds
        count, total = self._waiting[:, bucket].tolist()
        mean = total / count
        if bucket < len(bounds):
            mean = min(mean, bounds[bucket])
        if bucket:
            mean = max(mean, math.nextafter(bounds[bucket - 1], math.inf))
        self._waiting[:, bucket] -= num_values, num_values * total / count
        for _ in range(num_values):
            self._metric.observe(mean)


def _for_good(thing: Any) -> Any:
    """Keep the object while the interpreter ends, too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


def counter_family(name: str, description: str) -> Any:
    return _for_good(pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.COUNTER))


def gauge_family(name: str, description: str) -> Any:
    return _for_good(pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.GAUGE))
