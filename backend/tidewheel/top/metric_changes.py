"""Pages of metrics, and what changed between two of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tidewheel_client.server_pages import Figures

_MODEL_LABELS = ("model", "model_name")


@dataclass(frozen=True, slots=True)
class Page:
    """Figures that were read at a moment, by any clock."""

    figures: Figures
    seconds: float

    def of_model(self, model: str) -> Page:
        """Return the series of the model, and those that name none."""
        names = self.figures.names
        kept = (one for name in names for one in self.figures.samples(name) if _is_of(one.labels, model))
        return Page(Figures(kept), self.seconds)

    def labels(self, name: str, label: str) -> list[str]:
        return sorted({one.labels[label] for one in self.figures.samples(name) if label in one.labels})

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series with these labels, or None without any."""
        values = self._values(name, labels)
        return sum(values) if values else None

    def highest(self, name: str, **labels: str) -> float | None:
        return max(self._values(name, labels), default=None)

    def buckets(self, name: str) -> dict[float, float]:
        """Return the counts of a histogram up to each bound, in their order."""
        counts: dict[float, float] = {}
        for one in self.figures.samples(f"{name}_bucket"):
            bound = float(one.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + one.value
        return dict(sorted(counts.items()))

    def _values(self, name: str, labels: Mapping[str, str]) -> list[float]:
        return [one.value for one in self.figures.samples(name, **labels)]


class Change(NamedTuple):
    """Two pages of one server, one after the other."""

    before: Page
    after: Page

    @property
    def seconds(self) -> float:
        return self.after.seconds - self.before.seconds

    def growth(self, name: str, **labels: str) -> float | None:
        """Return how much a counter grew; None without it. One that is smaller now has begun anew."""
        now = self.after.total(name, **labels)
        if now is None:
            return None
        then = self.before.total(name, **labels) or 0.0
        return now - then if now >= then else now

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the growth a second; None without two pages of it."""
        growth = self.growth(name, **labels)
        return None if growth is None or self.seconds <= 0 else growth / self.seconds

    def ratio(self, part: str, whole: str, **labels: str) -> float | None:
        """Return how much one counter grew for each unit of another."""
        grown, by = self.growth(part, **labels), self.growth(whole, **labels)
        return grown / by if grown is not None and by else None

    def quantile(self, name: str, share: float) -> float | None:
        """Return a quantile of the values that a histogram took between the pages, None without one.

        It is interpolated within a bucket. In the last one, which has no upper bound, it is the lower bound.
        """
        then, now = self.before.buckets(name), self.after.buckets(name)
        counts = {bound: count - then.get(bound, 0.0) for bound, count in now.items()}
        if min(counts.values(), default=0.0) < 0:  # begun anew
            counts = now
        wanted = share * counts.get(math.inf, 0.0)
        for (low, below), (high, count) in itertools.pairwise([(0.0, 0.0), *counts.items()]):
            if count >= wanted and count > below:
                return low if math.isinf(high) else low + (high - low) * (wanted - below) / (count - below)
        return None


def _is_of(labels: Mapping[str, str], model: str) -> bool:
    named = [labels[label] for label in _MODEL_LABELS if label in labels]
    return not named or model in named
