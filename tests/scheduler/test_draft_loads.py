"""Random loads have the same tokens with and without drafts, and planted defects are found."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from support.long_runs import examples
from support.scheduler.draft_loads import compare
from tidewheel.batch import NO_DRAFT, BoolArray, Int32Array, RowArray, SampledTokens, accepted
from tidewheel.errors import InternalError
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.scheduler import scheduler
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.planner import StepPlanner
from tidewheel.scheduler.speculation import Speculation
from tidewheel.scheduler.state import SchedulerState
from tidewheel.scheduler.step_plan import StepPlan

HAPPENS = (
    "accepted", "rejected", "fewer_steps", "places", "recomputed", "swapped", "hits", "loras",
    "failed_steps", "failed_drafts", "stop", "length", "cancelled", "deadline", "NumericError", "InternalError",
)  # fmt: skip
NUM_LOADS = 100  # in which a defect is found


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """Keep the errors of planted failures out of the output."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_loads_have_the_same_tokens_with_and_without_drafts() -> None:
    totals = sum(map(compare, range(examples(60, 100))), Counter())
    assert [name for name in HAPPENS if not totals[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_many_loads_have_the_same_tokens_with_and_without_drafts(first: int) -> None:
    for seed in range(first, first + 100):
        compare(seed)


# --- defects ------------------------------------------------------------------------------------------------------


def positions_off_by_one(patch: pytest.MonkeyPatch) -> None:
    real = StepPlan.add_drafts

    def add_drafts(self: StepPlan, *arguments: Any) -> None:
        real(self, *arguments)
        self.decode_starts = self.decode_starts + (self._draft_tokens != NO_DRAFT).astype(np.int32)

    patch.setattr(StepPlan, "add_drafts", add_drafts)


def computed_tokens_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Count the last token, whose keys no step has computed."""
    real = SchedulerState.settle_drafts

    def settle_drafts(self: SchedulerState, rows: RowArray) -> None:
        self.columns.num_computed_tokens[rows] += 1
        real(self, rows)

    patch.setattr(SchedulerState, "settle_drafts", settle_drafts)


def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    def accepted_and_next(drafts: Int32Array, token_ids: Int32Array) -> BoolArray:
        follows = accepted(drafts, token_ids)
        follows[1:] |= follows[:-1] & (drafts[1:] != NO_DRAFT)
        return follows

    patch.setattr(scheduler, "accepted", accepted_and_next)


def one_token_too_few(patch: pytest.MonkeyPatch) -> None:
    """Keep the accepted drafts without the token after them, whose count the positions then miss."""
    real = RowColumns.append_tokens

    def append_tokens(
        self: RowColumns, rows: RowArray, tokens: Int32Array, num_tokens: Int32Array, now: float
    ) -> Any:
        is_last = np.append(rows[1:] != rows[:-1], True) & (np.append(False, rows[1:] == rows[:-1]))
        return real(self, rows, tokens, num_tokens - is_last, now)

    patch.setattr(RowColumns, "append_tokens", append_tokens)


def accepted_after_a_stop(patch: pytest.MonkeyPatch) -> None:
    def follow(drafts: Int32Array, token_ids: Int32Array) -> BoolArray:
        is_stop = token_ids == SampledTokens.NOT_SAMPLED
        return accepted(drafts, np.where(is_stop, np.append(drafts[1:], NO_DRAFT), token_ids))

    patch.setattr(scheduler, "accepted", follow)


def rejected_block_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "trim", lambda self, row, num_blocks: None)


def rejected_block_kept_with_its_slots(patch: pytest.MonkeyPatch) -> None:
    real = SchedulerState.settle_drafts

    def settle_drafts(self: SchedulerState, rows: RowArray) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(KVCacheManager, "trim", lambda *_: None)
            real(self, rows)
        for row in rows.tolist():
            self.columns.num_slots[row] = len(self.kv.block_table(row)) * self.kv.block_size

    patch.setattr(SchedulerState, "settle_drafts", settle_drafts)


def one_block_too_many_given_back(patch: pytest.MonkeyPatch) -> None:
    real = KVCacheManager.num_blocks_for

    def settle_drafts(self: SchedulerState, rows: RowArray) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(KVCacheManager, "num_blocks_for", lambda kv, count: real(kv, count - 1))
            settle(self, rows)

    settle = SchedulerState.settle_drafts
    patch.setattr(SchedulerState, "settle_drafts", settle_drafts)


def rejected_slot_cached(patch: pytest.MonkeyPatch) -> None:
    """Publish the block of the last token, whose slot still holds the keys of a rejected draft."""
    real = SchedulerState.settle_drafts

    def settle_drafts(self: SchedulerState, rows: RowArray) -> None:
        real(self, rows)
        for row in dict.fromkeys(rows.tolist()):
            num_tokens = min(int(self.columns.num_tokens[row]), int(self.columns.num_slots[row]))
            self.kv.commit(row, self.columns.request(row), num_tokens)

    patch.setattr(SchedulerState, "settle_drafts", settle_drafts)


def rejected_slot_cached_at_the_end(patch: pytest.MonkeyPatch) -> None:
    real = RowColumns.num_cacheable_tokens

    def num_cacheable_tokens(self: RowColumns, row: int) -> int:
        is_drafted = self.num_draft_tokens[row] > 0
        most = min(int(self.num_slots[row]), int(self.num_tokens[row]))
        return max(real(self, row), most) if is_drafted else real(self, row)

    patch.setattr(RowColumns, "num_cacheable_tokens", num_cacheable_tokens)


def drafts_past_max_tokens(patch: pytest.MonkeyPatch) -> None:
    real = Speculation.choose
    patch.setattr(Speculation, "choose", lambda self, rows, most, budget: real(self, rows, most + 1, budget))


def drafts_over_the_budget(patch: pytest.MonkeyPatch) -> None:
    real = Speculation.choose
    patch.setattr(Speculation, "choose", lambda self, rows, most, budget: real(self, rows, most, 1000))


def drafts_of_preempted_rows(patch: pytest.MonkeyPatch) -> None:
    """Plan drafts before the prompts, and drop of a preempted row its first entry alone."""
    real = StepPlanner._plan_prompts

    def plan_prompts(self: StepPlanner, rows: RowArray) -> None:
        speculation = self._state.speculation
        if speculation is not None and self._plan.has_decodes_alone and not self._state.in_flight:
            self._plan_drafts(speculation)
        real(self, rows)

    def drop_decodes(self: StepPlan, victims: list[int]) -> None:
        stays = ~np.isin(self.decode_rows, victims)
        if len(self._draft_tokens):
            stays |= self._draft_tokens != NO_DRAFT
            self._draft_tokens = self._draft_tokens[stays]
        self.decode_rows, self.decode_starts = self.decode_rows[stays], self.decode_starts[stays]

    patch.setattr(StepPlanner, "_plan_prompts", plan_prompts)
    patch.setattr(StepPlan, "drop_decodes", drop_decodes)


def drafts_beside_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPlan, "has_decodes_alone", property(lambda self: len(self.decode_rows) > 0))


def step_ahead_of_drafts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerState, "awaits_tokens", lambda self: False)


def drafts_of_the_last_request(patch: pytest.MonkeyPatch) -> None:
    """Forget that another request has taken the row."""
    patch.setattr(Speculation, "enter", lambda self, request: None)


def rejected_tokens_proposed_from(patch: pytest.MonkeyPatch) -> None:
    real = Speculation.propose

    def propose(self: Speculation) -> None:
        if len(self._last_rows):
            rows = self._last_rows[self._columns.running.take(self._last_rows)][:1]
            self._proposer.append(rows, np.zeros(len(rows), dtype=np.int32))
        real(self)

    patch.setattr(Speculation, "propose", propose)


def log_probabilities_of_neighbours(patch: pytest.MonkeyPatch) -> None:
    real = scheduler._select

    def select(logprobs: Any, sampling: BoolArray) -> Any:
        return real(logprobs, np.sort(sampling)[::-1])

    patch.setattr(scheduler, "_select", select)


def not_finite_before_the_tokens(patch: pytest.MonkeyPatch) -> None:
    """End a request without the tokens of the step that precede the logits that are not finite."""

    def follow(drafts: Int32Array, token_ids: Int32Array) -> BoolArray:
        follows, rows = accepted(drafts, token_ids), np.cumsum(drafts == NO_DRAFT)
        fails = follows & (token_ids == SampledTokens.NOT_FINITE)
        return follows & (fails | ~np.isin(rows, rows[fails]))

    patch.setattr(scheduler, "accepted", follow)


def not_finite_after_a_wrong_draft(patch: pytest.MonkeyPatch) -> None:
    """End a request for logits that no plain decode computes."""

    def follow(drafts: Int32Array, token_ids: Int32Array) -> BoolArray:
        follows, rows = accepted(drafts, token_ids), np.cumsum(drafts == NO_DRAFT)
        fails = (token_ids == SampledTokens.NOT_FINITE).nonzero()[0]
        follows[fails[np.unique(rows[fails], return_index=True)[1]]] = True
        return follows

    patch.setattr(scheduler, "accepted", follow)


DEFECTS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    positions_off_by_one, computed_tokens_off_by_one, one_token_too_many, one_token_too_few, accepted_after_a_stop,
    rejected_block_kept, rejected_block_kept_with_its_slots, one_block_too_many_given_back, rejected_slot_cached,
    rejected_slot_cached_at_the_end, drafts_past_max_tokens, drafts_over_the_budget, drafts_of_preempted_rows,
    drafts_beside_prompts, step_ahead_of_drafts, drafts_of_the_last_request, rejected_tokens_proposed_from,
    log_probabilities_of_neighbours, not_finite_before_the_tokens, not_finite_after_a_wrong_draft,
)  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_found(defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    with pytest.raises((AssertionError, InternalError)):
        for seed in range(NUM_LOADS):
            compare(seed)
