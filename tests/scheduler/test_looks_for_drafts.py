"""How often rows are looked at for drafts."""

from __future__ import annotations

import numpy as np

from tidewheel.batch import Int32Array, RowArray
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.goodput import MOST_HALVINGS, PATIENCE, Goodput
from tidewheel.scheduler.speculation import Proposals, Speculation
from tidewheel.stats import EngineStats

ROWS = np.arange(2)


class CountedLooks:
    """Proposer of token 7 for each row."""

    is_free = True

    def __init__(self) -> None:
        self.tokens: list[list[int]] = [[], []]
        self.num_looks = 0

    def enter(self, row: int, token_ids: Int32Array) -> None:
        pass

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            self.tokens[row].append(token_id)

    def propose(self, rows: RowArray) -> Proposals:
        self.num_looks += 1
        ones = np.ones(len(rows), np.int32)
        return Proposals(ones, np.full((len(rows), 1), 7, np.int32), 0 * ones)


class Steps:
    """Steps of two rows without drafts."""

    def __init__(self) -> None:
        columns = RowColumns(2)
        columns.running[:] = True
        self.proposer = CountedLooks()
        self.speculation = Speculation(self.proposer, Goodput(2, 1), 1, columns, EngineStats())

    def run(self, tokens: Int32Array) -> int:
        """Take steps of these tokens [steps, rows]. Return the number of looks."""
        before = self.proposer.num_looks
        for of_step in tokens:
            self.speculation.observe(ROWS, of_step)
            self.speculation.propose()
        return self.proposer.num_looks - before


def test_looks_become_seldom_while_no_proposal_is_right_and_frequent_when_one_is() -> None:
    steps = Steps()
    wrong, right = np.full((100, 2), 1, np.int32), np.full((100, 2), (1, 7), np.int32)
    num_left = 100 - PATIENCE * ((1 << MOST_HALVINGS) - 1)  # steps with the fewest looks
    assert steps.run(wrong) == PATIENCE * MOST_HALVINGS + (num_left >> MOST_HALVINGS)
    assert steps.run(wrong) <= 1 + (100 >> MOST_HALVINGS)
    assert steps.run(right) > 100 - (1 << MOST_HALVINGS)


def test_the_proposer_gets_all_tokens_in_order() -> None:
    steps = Steps()
    tokens = np.random.default_rng(0).integers(0, 9, (100, 2)).astype(np.int32)
    steps.run(tokens)
    seen = len(steps.proposer.tokens[0])
    assert seen >= 100 - (1 << MOST_HALVINGS)
    assert steps.proposer.tokens == tokens[:seen].T.tolist()
