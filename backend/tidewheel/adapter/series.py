"""Time series on Triton's `/metrics`, advanced in aggregate.

Each call of a Triton metric is a round trip to the server (14 to 90 µs, measured), so totals are counted in this
process and only differences travel, and nothing travels for what did not change. A Triton histogram takes one value
a call; here a histogram is published as what Prometheus makes of one anyway: series `<name>_bucket`, `<name>_sum` and
`<name>_count`. They are announced as gauges that only grow, since the parser of Prometheus' Python client adds
`_total` to the name of every counter, and queries go by names alone. Series of the same name and labels in several
front ends are one series in the server, so their differences add up.

Triton takes a family away with its last Python object, under the feet of its metrics: each series keeps its own.
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
        """Somebody else may set it meanwhile."""
        self._value = None


class Counter:
    """Follows a total that grows; one that shrinks has begun again at 0 (its process was started again)."""

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
        """Somebody else publishes up to here."""
        self._total = total


class CounterByLabel:
    """Counters of one family that differ in one label, made as its values turn up."""

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
        """`counts` holds the number of values of each bucket, not cumulative, the one above all bounds last."""
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
