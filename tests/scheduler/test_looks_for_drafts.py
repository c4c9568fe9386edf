"""How often rows are looked at for drafts."""

from __future__ import annotations

import numpy as np

from tidewheel.batch import NO_DRAFT, Int32Array, RowArray
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.goodput import MOST_HALVINGS, PATIENCE, Goodput
from tidewheel.scheduler.speculation import Proposals, Speculation
from tidewheel.stats import EngineStats


class CountedLooks:
    """Proposer of token 7 for the last rows."""

    is_free = True

    def __init__(self, num_rows: int, num_proposals: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self.num_looks = 0
        self.counts = (np.arange(num_rows) >= num_rows - num_proposals).astype(np.int32)

    def enter(self, row: int, token_ids: Int32Array) -> None:
        pass

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            self.tokens[row].append(token_id)

    def propose(self, rows: RowArray) -> Proposals:
        self.num_looks += 1
        return Proposals(self.counts[rows], np.full((len(rows), 1), 7, np.int32), np.zeros(len(rows), np.int32))


class Steps:
    """Steps in which each row gets one token."""

    def __init__(self, num_rows: int = 2, num_proposals: int = 2, goodput: Goodput | None = None) -> None:
        columns = RowColumns(num_rows)
        columns.running[:] = True
        self.rows = np.arange(num_rows)
        self.proposer = CountedLooks(num_rows, num_proposals)
        self.speculation = Speculation(self.proposer, goodput or Goodput(num_rows, 1), 1, columns, EngineStats())

    def run(self, tokens: Int32Array) -> int:
        """Take steps of these tokens [steps, rows]. Return the number of looks."""
        before = self.proposer.num_looks
        for of_step in tokens:
            self.speculation.observe(self.rows, of_step)
            self.speculation.propose()
        return self.proposer.num_looks - before


def costly_waits(num_rows: int) -> Goodput:
    goodput = Goodput(num_rows, 1)
    goodput.cost.wait = 0.1
    return goodput


def test_looks_become_seldom_while_no_proposal_is_right_and_frequent_when_one_is() -> None:
    steps = Steps(goodput=costly_waits(2))
    wrong, right = np.full((100, 2), 1, np.int32), np.full((100, 2), (1, 7), np.int32)
    num_left = 100 - PATIENCE * ((1 << MOST_HALVINGS) - 1)  # steps with the fewest looks
    assert steps.run(wrong) == PATIENCE * MOST_HALVINGS + (num_left >> MOST_HALVINGS)
    assert steps.run(wrong) <= 1 + (100 >> MOST_HALVINGS)
    assert steps.run(right) > 100 - (1 << MOST_HALVINGS)


class TakesAll(Goodput):
    def choose(self, rows: RowArray, counts: Int32Array, kinds: Int32Array, budget: int) -> Int32Array:
        return counts


def test_looks_become_seldom_while_all_drafts_are_rejected() -> None:
    steps, most = Steps(goodput=TakesAll(2, 1)), np.ones(2, np.int32)
    entries, draft_tokens = np.array([0, 0, 1, 1]), np.array([NO_DRAFT, 7, NO_DRAFT, 7], np.int32)
    for _ in range(200):
        if steps.speculation.choose(steps.rows, most, 2).any():
            steps.speculation.observe_drafts(entries, draft_tokens, draft_tokens == NO_DRAFT)
        steps.run(np.full((1, 2), 1, np.int32))
    assert steps.run(np.full((100, 2), 1, np.int32)) <= 1 + (100 >> MOST_HALVINGS)


def test_right_proposals_that_no_step_takes_do_not_make_looks_frequent_where_nothing_waits() -> None:
    steps = Steps()
    steps.run(np.full((100, 2), 7, np.int32))
    assert steps.run(np.full((100, 2), 7, np.int32)) <= 1 + (100 >> MOST_HALVINGS)


def test_right_proposals_of_few_rows_do_not_make_looks_frequent() -> None:
    steps = Steps(num_rows=5, num_proposals=2, goodput=costly_waits(5))
    steps.run(np.full((100, 5), 1, np.int32))
    assert steps.run(np.full((100, 5), 7, np.int32)) <= 1 + (100 >> MOST_HALVINGS)


def test_steps_without_rows_do_not_make_looks_frequent() -> None:
    steps = Steps(goodput=costly_waits(2))
    steps.run(np.full((100, 2), 1, np.int32))
    num_looks, all_rows = 0, steps.rows
    for count in np.random.default_rng(0).choice((0, 2), 100).tolist():
        steps.rows = all_rows[:count]
        num_looks += steps.run(np.full((1, count), 1, np.int32))
    assert num_looks <= 1 + (100 >> MOST_HALVINGS)


def test_the_proposer_gets_all_tokens_in_order() -> None:
    steps = Steps()
    tokens = np.random.default_rng(0).integers(0, 9, (100, 2)).astype(np.int32)
    steps.run(tokens)
    seen = len(steps.proposer.tokens[0])
    assert seen >= 100 - (1 << MOST_HALVINGS)
    assert steps.proposer.tokens == tokens[:seen].T.tolist()
