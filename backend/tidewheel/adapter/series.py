"""Time series on Triton's `/metrics`.

Each call of a Triton metric is a round trip to the server (14 to 90 µs, measured). So totals are counted here and
only differences are sent.

A Triton histogram takes one value per call. So histograms are published as Prometheus' series `<name>_bucket`,
`<name>_sum` and `<name>_count`. They are announced as gauges, because Prometheus' Python parser adds `_total` to
counter names, and queries use only names. Front ends share series of equal name and labels, so their differences add
up.

Triton removes a family's metrics with its last Python object, so each series keeps one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

Labels = Mapping[str, str]


class Gauge:
    def __init__(self, family: Any, labels: Labels) -> None:
        self._metric = family.Metric(labels=dict(labels))
        self._family = family
        self._value: float | None = None

    def set(self, value: float) -> None:
        if value != self._value:
            self._metric.set(value)
            self._value = value

    def forget(self) -> None:
        """Send the next value in any case: another front end may set the gauge."""
        self._value = None


class Counter:
    """A growing total. A smaller one comes from a restarted process."""

    def __init__(self, family: Any, labels: Labels) -> None:
        self._metric = family.Metric(labels=dict(labels))
        self._family = family
        self._total = 0.0

    def advance(self, total: float) -> None:
        difference = total - self._total if total >= self._total else total
        if difference > 0:
            self._metric.increment(difference)
        self._total = total

    def follow(self, total: float) -> None:
        """Skip what another front end has published."""
        self._total = total


class CounterByLabel:
    """Counters that differ in one label, made as its values appear."""

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


class Histogram:
    def __init__(self, name: str, description: str, bounds: Sequence[float], labels: Labels) -> None:
        buckets = gauge_family(f"{name}_bucket", f"{description} (at most le)")
        edges = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        self._buckets = [Counter(buckets, {**labels, "le": edge}) for edge in edges]
        self._sum = Counter(gauge_family(f"{name}_sum", f"{description} (sum)"), labels)
        self._count = Counter(gauge_family(f"{name}_count", f"{description} (number)"), labels)

    def advance(self, counts: Sequence[int], total: float) -> None:
        """Advance to `counts` per bucket (not cumulative, overflow last) and their sum `total`."""
        cumulative = 0
        for bucket, count in zip(self._buckets, counts, strict=True):
            cumulative += count
            bucket.advance(cumulative)
        self._sum.advance(total)
        self._count.advance(cumulative)


def counter_family(name: str, description: str) -> Any:
    return pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.COUNTER)


def gauge_family(name: str, description: str) -> Any:
    return pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.GAUGE)
