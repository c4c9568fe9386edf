"""Draft tokens: what a row's next tokens may be, checked by the model several in a step.

A row with k drafts is computed at k + 1 positions. Draws are a function of (seed, position), so the tokens sampled
there are those of plain steps as long as the drafts before them equal them (compare Leviathan et al., "Fast inference
from transformers via speculative decoding", 2023, whose rule of acceptance draws anew).
"""

from typing import NamedTuple, Protocol

import numpy as np

from tidewheel.batch import NO_DRAFT, TO_DRAFT, BoolArray, Int32Array, RowArray, ScheduledBatch
from tidewheel.request import Request
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.goodput import DecodeStep, Goodput
from tidewheel.stats import EngineStats

ANY_BUDGET = 1 << 30


class Proposals(NamedTuple):
    """Drafts that could follow the known tokens of n rows."""

    counts: Int32Array  # [n]
    token_ids: Int32Array  # [n, most], `TO_DRAFT` where the runner drafts
    kinds: Int32Array  # [n] in [0, NUM_KINDS): acceptance is estimated for each kind


class Proposer(Protocol):
    @property
    def is_free(self) -> bool:
        """Return whether proposals cost next to no time: their acceptance is then learned in all steps."""

    def enter(self, row: int, token_ids: Int32Array) -> None:
        """Begin a row with all tokens of its request so far."""

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        """Append known tokens [n] of rows; a row may repeat, in order of its tokens."""

    def propose(self, rows: RowArray) -> Proposals:
        """Propose what follows the known tokens of distinct rows."""


class RunnerDrafts:
    """Proposer of drafts that the runner makes on the device."""

    is_free = False

    def __init__(self, most: int) -> None:
        self._most = most

    def enter(self, row: int, token_ids: Int32Array) -> None:
        pass

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        pass

    def propose(self, rows: RowArray) -> Proposals:
        n = len(rows)
        token_ids = np.full((n, self._most), TO_DRAFT, dtype=np.int32)
        return Proposals(np.full(n, self._most, dtype=np.int32), token_ids, np.zeros(n, dtype=np.int32))


class ChosenDrafts(NamedTuple):
    counts: Int32Array  # [n] of each row
    token_ids: Int32Array  # [sum of counts], row by row


class Speculation:
    """Owner of the proposals that follow the known tokens of running rows."""

    def __init__(
        self, proposer: Proposer, goodput: Goodput, most: int, columns: RowColumns, stats: EngineStats
    ) -> None:
        num_rows = columns.num_rows
        self._proposer = proposer
        self._goodput = goodput
        self._columns = columns
        self._stats = stats
        self._counts = np.zeros(num_rows, dtype=np.int32)
        self._token_ids = np.zeros((num_rows, most), dtype=np.int32)
        self._kinds = np.zeros(num_rows, dtype=np.int32)
        self.has_proposals = False
        self._had_drafts = False  # the step that is applied
        self._unseen: list[tuple[RowArray, Int32Array]] = []  # rows and tokens of steps that the proposer lacks
        self._last_rows: RowArray = np.empty(0, dtype=np.intp)  # of the last step; a row with accepted drafts repeats

    def enter(self, request: Request) -> None:
        self._append_unseen()
        output = np.array(request.output_token_ids, dtype=np.int32)
        self._proposer.enter(request.row, np.concatenate((request.prompt_token_ids, output)))
        self._goodput.enter(request.row, int(self._columns.classes[request.row]))
        self._counts[request.row] = 0

    def choose(self, rows: RowArray, most: Int32Array, budget: int) -> Int32Array:
        """Return how many drafts of distinct rows pay in a step [n]: at most `most` [n], in all at most `budget`."""
        counts = np.minimum(self._counts.take(rows), most)
        if counts.any():
            counts = self._goodput.choose(rows, counts, self._kinds.take(rows), budget)
        return counts

    def is_worthwhile(self) -> bool:
        """Return whether drafts would pay after the known tokens of all rows. Then look for them after the next."""
        if not self.has_proposals:
            return False
        rows = self._columns.running.nonzero()[0]
        return bool(self.choose(rows, self._counts.take(rows), ANY_BUDGET).any())

    def drafts(self, rows: RowArray, counts: Int32Array) -> ChosenDrafts:
        is_used = np.arange(self._token_ids.shape[1]) < counts[:, None]
        return ChosenDrafts(counts, self._token_ids[rows][is_used])

    def observe(self, rows: RowArray, tokens: Int32Array) -> None:
        """Learn a step's tokens [n] of running rows; a row with accepted drafts repeats."""
        if self.has_proposals and self._proposer.is_free and not self._had_drafts:
            self._observe_unused(rows, tokens)
        self._had_drafts = False
        self._last_rows = rows
        self._unseen.append((rows, tokens))

    def _append_unseen(self) -> None:
        if len(self._unseen) == 1:
            self._proposer.append(*self._unseen[0])
        elif self._unseen:
            rows, tokens = (np.concatenate(parts) for parts in zip(*self._unseen, strict=True))
            order = rows.argsort(kind="stable")
            self._proposer.append(rows[order], tokens[order])
        self._unseen.clear()

    def _observe_unused(self, rows: RowArray, tokens: Int32Array) -> None:
        has_proposal = self._counts.take(rows) > 0
        rows, tokens = rows[has_proposal], tokens[has_proposal]
        num_right = (self._token_ids[rows, 0] == tokens).astype(np.int32)
        self._goodput.observe_drafts(rows, self._kinds.take(rows), np.ones_like(num_right), num_right)

    def propose(self) -> None:
        """Propose what follows the tokens of the rows that were observed last; seldom, if looks were in vain."""
        if not self._goodput.is_look_due(len(self._unseen)):
            if self.has_proposals:
                self._counts[:] = 0
                self.has_proposals = False
            return
        self._append_unseen()
        rows = (np.bincount(self._last_rows, minlength=len(self._counts)) * self._columns.running).nonzero()[0]
        self._counts[rows], self._token_ids[rows], self._kinds[rows] = self._proposer.propose(rows)
        self.has_proposals = bool(self._counts.any())

    def observe_drafts(self, rows: RowArray, draft_tokens: Int32Array, follows: BoolArray) -> None:
        """Learn which entries [n] of a step with drafts counted. Call before `observe`."""
        firsts = (draft_tokens == NO_DRAFT).nonzero()[0]
        num_drafts = np.add.reduceat(draft_tokens >= 0, firsts, dtype=np.int32)
        num_accepted = np.add.reduceat(follows, firsts, dtype=np.int32) - 1
        has_drafts = (num_drafts > 0) & (num_accepted >= 0)
        rows = rows[firsts[has_drafts]]
        num_drafts, num_accepted = num_drafts[has_drafts], num_accepted[has_drafts]
        num_tested = np.minimum(num_accepted + 1, num_drafts)
        self._goodput.observe_drafts(rows, self._kinds.take(rows), num_tested, num_accepted)
        self._columns.num_draft_tokens[rows] += num_drafts
        self._columns.num_accepted_draft_tokens[rows] += num_accepted
        self._stats.num_drafts += len(rows)
        self._stats.num_draft_tokens += int(num_drafts.sum())
        self._stats.num_accepted_draft_tokens += int(num_accepted.sum())
        self._had_drafts = True

    def observe_step(self, batch: ScheduledBatch, seconds: float, *, has_waited: bool) -> None:
        """Learn the seconds of the step that was observed last, if it had decodes alone and rows were looked at."""
        has_drafts, num_entries = len(batch.draft_tokens) > 0, len(batch.rows)
        if batch.num_decodes != num_entries or (self._unseen and not (has_drafts or has_waited)):
            return
        step = DecodeStep(num_entries, has_waited=has_waited)
        if has_drafts:
            num_entries_of_rows = np.bincount(batch.rows)
            num_rows = int(np.count_nonzero(num_entries_of_rows))
            step = DecodeStep(num_rows, num_entries - num_rows, int(num_entries_of_rows.max()) - 1, has_waited)
        num_tokens = np.bincount(self._last_rows)
        rows = num_tokens.nonzero()[0]
        self._goodput.observe_step(rows, num_tokens[rows], step, seconds)
