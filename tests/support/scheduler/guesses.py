"""A proposer of drafts that are right with a chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np

from tidewheel.batch import Int32Array, RowArray
from tidewheel.scheduler import state
from tidewheel.scheduler.goodput import NUM_KINDS, Goodput
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.scheduler.speculation import GrammarDrafts, Proposals


class Guesses:
    """Proposer of any number of drafts, each the token that `follow` gives, or a random one."""

    is_free = True

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        follow: Callable[[Sequence[int]], int | None],
        chance: float,
        *,
        most: int = 8,
        seed: int = 0,
    ) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self._vocab_size = vocab_size
        self._follow = follow
        self._chance = chance
        self._most = most
        self._random = np.random.default_rng(seed)

    def enter(self, row: int, token_ids: Int32Array) -> None:
        self._tokens[row] = token_ids.tolist()

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            self._tokens[row].append(token_id)

    def propose(self, rows: RowArray) -> Proposals:
        counts = self._random.integers(0, self._most + 1, len(rows), dtype=np.int32)
        token_ids = np.zeros((len(rows), self._most), dtype=np.int32)
        for index, row in enumerate(rows.tolist()):
            drafts = self._drafts(self._tokens[row], int(counts[index]))
            token_ids[index, : len(drafts)] = drafts
        return Proposals(counts, token_ids, counts % NUM_KINDS)

    def _drafts(self, tokens: list[int], count: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(count):
            right = self._follow(tokens + drafts) if self._random.random() < self._chance else None
            drafts.append(int(self._random.integers(self._vocab_size)) if right is None else right)
        return drafts


class EveryDraft(Goodput):
    """Choice of all drafts that the budget allows."""

    def choose(self, rows: RowArray, counts: Int32Array, kinds: Int32Array, budget: int) -> Int32Array:
        num_before = np.cumsum(counts) - counts
        return np.minimum(counts, (budget - num_before).clip(0)).astype(np.int32)


def put_proposer(scheduler: Scheduler, guesses: Guesses, *, filters_drafts: bool = False) -> None:
    """Take every draft of `guesses`, or those that grammars allow and force."""
    columns = scheduler._state.columns
    with mock.patch.object(state, "Goodput", EveryDraft):
        scheduler.use_proposer(GrammarDrafts(guesses, columns) if filters_drafts else guesses)
