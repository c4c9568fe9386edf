from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from tidewheel.metrics import Metric
from tidewheel_client.server_pages import Figures

_MODEL_LABELS = ("model", "model_name")


def figures_of_model(figures: Figures, model: str) -> Figures:
    """Return the metrics of a model, and metrics without a model."""
    series = (one for name in figures.names for one in figures.samples(name))
    models = ((one, [one.labels[label] for label in _MODEL_LABELS if label in one.labels]) for one in series)
    return Figures(one for one, named in models if not named or model in named)


def label_values(figures: Figures, metric: Metric, label: str) -> list[str]:
    return sorted({one.labels[label] for one in figures.samples(metric.name) if label in one.labels})


class PageChange(NamedTuple):
    before: Figures
    after: Figures
    seconds: float  # between both

    def total(self, metric: Metric, **labels: str) -> float | None:
        """Return the sum of a metric over the series with these labels, or None without any."""
        return _total(self.after, metric, labels)

    def total_or_zero(self, metric: Metric, **labels: str) -> float:
        return self.total(metric, **labels) or 0.0

    def highest(self, metric: Metric, **labels: str) -> float | None:
        return max((one.value for one in self.after.samples(metric.name, **labels)), default=None)

    def growth(self, metric: Metric, **labels: str) -> float | None:
        now, then = self.total(metric, **labels), _total(self.before, metric, labels) or 0.0
        return now - then if now is not None and now >= then else now  # it has begun anew

    def rate(self, metric: Metric, **labels: str) -> float | None:
        """Return a counter's growth per second; None without the counter or a second page."""
        growth = self.growth(metric, **labels)
        return None if growth is None or self.seconds <= 0 else growth / self.seconds

    def ratio(self, part: Metric, whole: Metric, **labels: str) -> float | None:
        """Return the growth of `part` over that of `whole`; None if either is unknown or 0."""
        grown, by = self.growth(part, **labels), self.growth(whole, **labels)
        return grown / by if grown is not None and by else None

    def quantile(self, metric: Metric, share: float) -> float | None:
        """Return the quantile of values observed between the pages, None without values.

        Values are interpolated within a bucket; in the last bucket the quantile is its lower bound.
        """
        then, now = _buckets(self.before, metric), _buckets(self.after, metric)
        counts = {bound: count - then.get(bound, 0.0) for bound, count in now.items()}
        if min(counts.values(), default=0.0) < 0:  # begun anew
            counts = now
        wanted = share * counts.get(math.inf, 0.0)
        for (low, below), (high, count) in itertools.pairwise([(0.0, 0.0), *counts.items()]):
            if count >= wanted and count > below:
                return low if math.isinf(high) else low + (high - low) * (wanted - below) / (count - below)
        return None


def _total(figures: Figures, metric: Metric, labels: dict[str, str]) -> float | None:
    values = [one.value for one in figures.samples(metric.name, **labels)]
    return sum(values) if values else None


def _buckets(figures: Figures, metric: Metric) -> dict[float, float]:
    """Return the cumulative counts of a histogram by upper bound, ascending."""
    counts: dict[float, float] = {}
    for one in figures.samples(f"{metric.name}_bucket"):
        bound = float(one.labels["le"])
        counts[bound] = counts.get(bound, 0.0) + one.value
    return dict(sorted(counts.items()))
