"""Figures of requests by adapter, under a bounded number of labels."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from functools import lru_cache

from tidewheel.request import Request
from tidewheel.stats import LoraFigures

MAX_LORA_LABELS = 32
OTHERS = "other"
LABEL_CHARS = 64


@lru_cache(4096)
def label_of(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:LABEL_CHARS]


class LoraFigureTable:
    """Figures of the most used adapters by label, and of the others together.

    A request of an unlabelled adapter replaces the label with the fewest requests, n, with probability 1/2n, and its
    sums begin at 0 (randomized admission policy: Ben Basat et al., INFOCOM 2017). So few labels appear over time.
    """

    def __init__(self, figures: dict[str, LoraFigures]) -> None:
        self._figures = figures
        self._random = random.Random(0)  # noqa: S311 - no secret

    def of(self, name: str, *, is_new: bool = False) -> LoraFigures:
        """Return the figures under an adapter's label. `is_new`: of a request that arrives."""
        label = label_of(name)
        if is_new and label not in self._figures:
            self._add_label(label)
        return self._figures.get(label) or self._figures[OTHERS]

    def count(self, unfinished: Iterable[Request]) -> None:
        """Count running and waiting requests."""
        if not self._figures:
            return
        for figures in self._figures.values():
            figures.num_running = figures.num_waiting = 0
        for request in unfinished:
            if request.lora is not None:
                figures = self.of(request.lora.name)
                figures.num_running += request.row >= 0
                figures.num_waiting += request.row < 0

    def _add_label(self, label: str) -> None:
        self._figures.setdefault(OTHERS, LoraFigures())
        if len(self._figures) > MAX_LORA_LABELS:
            least = min(self._figures.keys() - {OTHERS}, key=lambda one: self._figures[one].num_requests)
            if self._random.random() * 2 * self._figures[least].num_requests > 1.0:
                return
            del self._figures[least]
        self._figures[label] = LoraFigures()
