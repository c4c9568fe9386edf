"""Turns of shapes: a step of a model that takes many steps computes rows of one shape (bucket)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

MAX_URGENT = 15  # steps of CRITICAL requests in a row, while others could run
_LEAST_S = 1e-6  # of a step, if the clock stands still


class Turn(NamedTuple):
    shape: str
    is_urgent: bool  # CRITICAL requests alone


class ShapeTurns:
    """Deficit round robin over shapes (Shreedhar and Varghese, 1995) with measured seconds of steps.

    A visit adds the longest of the shapes' last steps to a shape's balance, and each step is subtracted. Between two
    steps of a shape, each other takes at most the longest step and one of its own, beside urgent turns.
    """

    def __init__(self) -> None:
        self._balances: dict[Turn, float] = {}  # seconds, in the order of visits
        self._last_seconds: dict[Turn, float] = {}
        self._row_seconds: dict[str, float] = {}
        self._num_urgent = 0

    def choose(self, active: Collection[Turn]) -> Turn:
        """Return the next of the turns that have requests; `active` is not empty."""
        kept = {turn: balance for turn, balance in self._balances.items() if turn in active}
        self._balances = kept | dict.fromkeys((turn for turn in active if turn not in kept), 0.0)
        self._last_seconds = {turn: self._last_seconds.get(turn, _LEAST_S) for turn in active}
        kinds = {turn.is_urgent for turn in active}
        is_urgent = True in kinds and (False not in kinds or self._num_urgent < MAX_URGENT)
        chosen = next(turn for turn in self._balances if turn.is_urgent is is_urgent)
        if self._balances[chosen] <= 0.0:
            self._balances[chosen] = max(self._balances[chosen] + max(self._last_seconds.values()), _LEAST_S)
        return chosen

    def max_rows(self, shape: str, slice_s: float | None) -> int | None:
        return None if slice_s is None else max(int(slice_s / self._row_seconds.get(shape, math.inf)), 1)

    def pay(self, turn: Turn, num_rows: int, seconds: float) -> None:
        self._num_urgent = self._num_urgent + 1 if turn.is_urgent else 0
        self._last_seconds[turn] = seconds = max(seconds, _LEAST_S)
        self._row_seconds[turn.shape] = seconds / num_rows
        left = self._balances.pop(turn, 0.0) - seconds
        self._balances = {turn: left} | self._balances if left > 0.0 else self._balances | {turn: left}
