"""Drafts in every step, so that a test does not depend on what pays on its machine."""

from __future__ import annotations

from unittest import mock

import numpy as np

from tidewheel.batch import Int32Array, RowArray
from tidewheel.scheduler.goodput import Goodput


def always_drafts() -> mock._patch[object]:
    """Return a patch by which rows get as many drafts as there is room for."""

    def choose(_: Goodput, _rows: RowArray, counts: Int32Array, _kinds: Int32Array, budget: int) -> Int32Array:
        before = np.cumsum(counts) - counts
        return np.minimum(counts, budget - before).clip(0).astype(np.int32)

    return mock.patch.object(Goodput, "choose", choose)
