"""Figures of requests by adapter, under a bounded number of labels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from tidewheel.request import Request
from tidewheel.stats import LoraFigures

MAX_LORA_LABELS = 32
OTHERS = "other"
LABEL_CHARS = 64
_MAX_COUNTED = 4096  # names without a label


def label_of(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:LABEL_CHARS]


class LoraFigureTable:
    """Figures of the most used adapters by label, and of the others together.

    A name takes the label of another once it is used twice as often; the sums of that one go to the others.
    """

    def __init__(self, figures: dict[str, LoraFigures]) -> None:
        self._figures = figures
        self._num_unlabelled: Counter[str] = Counter()  # requests

    def add_requests(self, name: str, count: int) -> None:
        label = label_of(name)
        if label not in self._figures:
            self._num_unlabelled[label] += count
            self._add_label(label)
        self._of(label).num_requests += count

    def add_ended(self, request: Request, name: str) -> None:
        figures = self._of(label_of(name))
        figures.num_prompt_tokens += request.num_prompt_tokens
        figures.num_output_tokens += request.num_output_tokens

    def set_current(self, counts: Iterable[tuple[str, int, int]]) -> None:
        """Set the numbers of running and of waiting requests."""
        for figures in self._figures.values():
            figures.num_running = figures.num_waiting = 0
        for name, num_running, num_waiting in counts:
            figures = self._of(label_of(name))
            figures.num_running += num_running
            figures.num_waiting += num_waiting

    def _of(self, label: str) -> LoraFigures:
        return self._figures.get(label) or self._figures[OTHERS]

    def _add_label(self, label: str) -> None:
        others = self._figures.setdefault(OTHERS, LoraFigures())
        if len(self._figures) > MAX_LORA_LABELS:
            named = (one for one in self._figures if one != OTHERS)
            least = min(named, key=lambda one: self._figures[one].num_requests)
            if self._num_unlabelled[label] <= 2 * self._figures[least].num_requests:
                if len(self._num_unlabelled) > _MAX_COUNTED:
                    self._num_unlabelled = Counter(dict(self._num_unlabelled.most_common(_MAX_COUNTED // 2)))
                return
            left = self._figures.pop(least)
            self._num_unlabelled[least] = left.num_requests
            others.num_requests += left.num_requests
            others.num_prompt_tokens += left.num_prompt_tokens
            others.num_output_tokens += left.num_output_tokens
        del self._num_unlabelled[label]
        self._figures[label] = LoraFigures()
