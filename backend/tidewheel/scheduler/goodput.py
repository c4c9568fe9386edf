"""Number of draft tokens that pays in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tidewheel.batch import Int32Array, RowArray


class Goodput:
    def __init__(self, num_rows: int, most: int, step_seconds: Sequence[tuple[int, float]] = ()) -> None:  # noqa: ARG002
        self._most = most

    def enter(self, row: int, service_class: int) -> None:
        pass

    def choose(self, rows: RowArray, counts: Int32Array, kinds: Int32Array, budget: int) -> Int32Array:  # noqa: ARG002
        """Return the number of drafts of each row [n], at most `counts`, in all at most `budget`."""
        before = np.cumsum(counts) - counts
        chosen: Int32Array = np.minimum(counts, (budget - before)).clip(0).astype(np.int32)
        return chosen

    def observe_drafts(
        self, rows: RowArray, kinds: Int32Array, num_tested: Int32Array, num_accepted: Int32Array
    ) -> None:
        pass

    def observe_step(self, rows: RowArray, num_tokens: Int32Array, num_entries: int, seconds: float) -> None:
        pass
