"""What waiting for tokens to draft from may cost where steps are launched ahead."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from support.scheduler.ahead_runner import (
    APPLY_S,
    LAUNCH_S,
    MOST,
    ChanceDrafts,
    FloatArray,
    ModelledClock,
    ModelledEngine,
    QueuedStep,
    QueueingRunner,
    Table,
    answer,
    seconds_of,
)
from tidewheel.batch import NOT_DRAFTED, TO_DRAFT, RowArray, ScheduledBatch, StepOutputs
from tidewheel.request import RequestObjective
from tidewheel.scheduler.controllers import StepControl
from tidewheel.scheduler.goodput import CREDIT, SLACK, SLACK_TOKENS, WAIT_CREDIT
from tidewheel.scheduler.speculation import Proposals, RunnerDrafts
from tidewheel.scheduler.step_plan import InFlightStep, StepLimits

# Small models on a GPU: tokens cost little, and more.
FLAT = [(1, 0.0014), (8, 0.0014), (16, 0.00145), (32, 0.0016), (64, 0.0019), (128, 0.0028), (576, 0.009)]
STEEP = [(1, 0.0019), (8, 0.00195), (16, 0.0023), (32, 0.0026), (64, 0.0033), (128, 0.0042), (576, 0.012)]
NUM_TOKENS = 256
NUM_RUNS = 3  # the first one learns
UNKNOWN_COST = 0.7  # tokens that the first step with drafts costs more than is known of waiting


class Comparison:
    """Requests with drafts beside the same requests without."""

    def __init__(
        self, table: Table, num_rows: int, right: float, found: float = 1.0, *, num_without: int = 0
    ) -> None:
        plain, chances = ModelledEngine(table, num_rows), [0.0] * num_without + [found] * (num_rows - num_without)
        drafting = ModelledEngine(table, num_rows, ChanceDrafts(right, chances, seed=1))
        self.plain = plain.run(NUM_TOKENS)  # [rows, tokens]
        self.runs = np.stack([drafting.run(NUM_TOKENS) for _ in range(NUM_RUNS)])

    def least_gain(self) -> float:
        return float((self.plain.max() / self.runs.max(axis=(1, 2))).min())

    def latest(self) -> FloatArray:
        """Return the most tokens by which each row was late, less the slack in proportion to its tokens [rows]."""
        step = (self.plain[0, -1] - self.plain[0, 0]) / (NUM_TOKENS - 1)
        late: FloatArray = (self.runs - self.plain) / step - SLACK * np.arange(NUM_TOKENS)
        return late.max(axis=(0, 2))


@pytest.mark.parametrize(
    ("table", "num_rows", "right", "found"),
    [
        (FLAT, 1, 0.3, 1.0), (FLAT, 1, 0.5, 0.5), (FLAT, 8, 0.3, 1.0), (FLAT, 8, 0.5, 0.5), (FLAT, 64, 0.7, 1.0),
        (STEEP, 1, 0.3, 1.0), (STEEP, 8, 0.5, 1.0), (STEEP, 8, 0.7, 0.5), (STEEP, 64, 0.5, 1.0),
    ],
)  # fmt: skip
def test_where_drafts_do_not_pay_waiting_costs_less_than_3_percent_and_no_request_is_late(
    table: Table, num_rows: int, right: float, found: float
) -> None:
    comparison = Comparison(table, num_rows, right, found)
    assert comparison.least_gain() > 0.97
    wait = (LAUNCH_S + APPLY_S) / seconds_of(table, num_rows)
    assert comparison.latest().max() < SLACK_TOKENS + CREDIT + WAIT_CREDIT * wait + UNKNOWN_COST


@pytest.mark.parametrize(("table", "right"), [(FLAT, 0.7), (FLAT, 0.9), (STEEP, 0.7), (STEEP, 0.9)])
def test_a_request_without_drafts_is_not_late_beside_requests_with_drafts(table: Table, right: float) -> None:
    comparison = Comparison(table, 8, right, num_without=2)
    assert comparison.latest()[:2].max() < SLACK_TOKENS + UNKNOWN_COST


@pytest.mark.parametrize(
    ("table", "num_rows", "right", "gain"),
    [
        (FLAT, 1, 0.7, 1.7), (FLAT, 1, 0.9, 3.5), (FLAT, 8, 0.9, 2.5),
        (STEEP, 1, 0.5, 1.2), (STEEP, 1, 0.9, 3.6), (STEEP, 8, 0.9, 2.1),
    ],
)  # fmt: skip
def test_where_drafts_pay_they_are_waited_for(table: Table, num_rows: int, right: float, gain: float) -> None:
    assert Comparison(table, num_rows, right).least_gain() > gain


class ImprovingDrafts(ChanceDrafts):
    """Proposer, such as a draft model, whose proposals take time: mostly wrong, and right from position 300 on."""

    is_free = False

    def propose(self, rows: RowArray) -> Proposals:
        self._right = 0.1 if self._num_tokens[rows].max(initial=0) < 300 else 0.9
        return super().propose(rows)


@pytest.mark.parametrize(("table", "num_rows"), [(FLAT, 8), (STEEP, 1)])
def test_drafts_that_begin_to_be_right_are_found_where_steps_wait_for_them(table: Table, num_rows: int) -> None:
    engine = ModelledEngine(table, num_rows, ImprovingDrafts(0.1, [1.0] * num_rows, seed=1))
    engine.run(900)
    assert engine.scheduler.stats().num_accepted_draft_tokens > 300 * num_rows


def test_where_no_step_is_launched_ahead_none_has_waited() -> None:
    engine = ModelledEngine(FLAT, 1, ChanceDrafts(0.5, [1.0], seed=1), max_inflight_steps=1)
    engine.run(NUM_TOKENS)
    assert engine.scheduler.stats().num_draft_tokens > 0
    assert engine.goodput.cost.wait == 0.0


def test_a_step_whose_decodes_are_over_its_budget_has_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, limits = ModelledEngine(FLAT, 16, ChanceDrafts(1.0, [1.0] * 16, seed=1)), StepControl.limits

    def narrow(self: StepControl, now: float, slice_s: float | None = None) -> StepLimits:
        is_prompt_step = engine.scheduler._state.columns.num_running == 0
        return limits(self, now, slice_s)._replace(**{} if is_prompt_step else {"token_budget": 12})

    monkeypatch.setattr(StepControl, "limits", narrow)
    engine.run(32)
    assert engine.scheduler.stats().num_draft_tokens == 0


def test_no_step_waits_for_drafts_while_prompts_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ModelledEngine(FLAT, 2, ChanceDrafts(1.0, [1.0, 1.0], seed=1), max_num_batched_tokens=32)
    waits: list[bool] = []  # of steps with a prompt

    def observe_step(
        self: StepControl, step: InFlightStep, batch: ScheduledBatch, outputs: StepOutputs, now: float
    ) -> None:
        if batch.num_tokens > batch.num_decodes and not step.started:
            waits.append(step.has_waited)
        real(self, step, batch, outputs, now)

    real = StepControl.observe_step
    monkeypatch.setattr(StepControl, "observe_step", observe_step)
    engine.add(400)
    while not engine.scheduler.stats().num_accepted_draft_tokens:
        engine.step()
    engine.add(1, prompt=600)
    while engine.scheduler.has_unfinished:
        engine.step()
    assert len(waits) > 10 and not any(waits[1:])  # the first one follows a step with drafts


def test_requests_that_cannot_join_do_not_keep_drafts_off() -> None:
    drafts = ChanceDrafts(1.0, [1.0] * 4, seed=1)
    engine = ModelledEngine(FLAT, 4, drafts, scheduling_strategy="static", batch_size=1)
    for _ in range(3):
        engine.add(64)
    while engine.scheduler.has_unfinished:
        engine.step()
    assert engine.scheduler.stats().num_accepted_draft_tokens > 100


def test_rows_that_get_one_token_of_a_step_with_drafts_count_as_much_as_one_that_gets_many() -> None:
    drafts = ChanceDrafts(1.0, [1.0] + [0.0] * 7, seed=1)
    engine = ModelledEngine(FLAT, 8, drafts, max_inflight_steps=1)
    for _ in range(8):
        engine.add(NUM_TOKENS)
    while engine.scheduler.stats().num_accepted_draft_tokens < NUM_TOKENS // 2:
        engine.step()
    step_time = engine.scheduler.step_time
    assert step_time.seconds(0) * step_time.steps_per_token > 0.8 * (LAUNCH_S + seconds_of(FLAT, 8))


SLOW = [(1, 0.008), (9, 0.013), (128, 0.05)]  # a step with eight drafts takes longer than the pace that is asked for
PACE_MS = 10.0


def test_controllers_take_the_time_of_a_token_not_of_a_step_with_drafts() -> None:
    drafts = ChanceDrafts(1.0, [1.0], seed=1)
    engine = ModelledEngine(SLOW, 1, drafts, max_inflight_steps=1, target_tpot_ms=PACE_MS)
    engine.run(NUM_TOKENS)
    stats = engine.scheduler.stats()
    assert stats.num_accepted_draft_tokens > NUM_TOKENS // 2
    assert stats.token_budget == 8192
    assert engine.scheduler.step_time.seconds(0) > 1e-3 * PACE_MS, "what takes turns counts on a step's own time"
    refused = RequestObjective(tpot_s=1e-3 * PACE_MS, refuses=True)
    engine.add(4, objective=refused, arrival_time=engine.clock.now)


def test_rows_that_wait_for_their_pace_let_others_draft_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, limits = ModelledEngine(FLAT, 4, ChanceDrafts(1.0, [1.0] * 4, seed=1)), StepControl.limits

    def narrow(self: StepControl, now: float, slice_s: float | None = None) -> StepLimits:
        paced = {} if engine.scheduler._state.columns.num_running == 0 else {"max_decodes": 3}
        return limits(self, now, slice_s)._replace(**paced)

    monkeypatch.setattr(StepControl, "limits", narrow)
    for _ in range(4):
        engine.add(64, objective=RequestObjective(tpot_s=1.0))
    while engine.scheduler._state.columns.num_running in (0, 4):
        engine.step()
        assert engine.scheduler.stats().num_draft_tokens == 0


def test_a_step_that_memory_does_not_suffice_for_runs_without_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(self: QueueingRunner, batch: ScheduledBatch) -> QueuedStep:
        if (batch.draft_tokens >= 0).any():
            failed.append(batch)
            raise MemoryError
        return real(self, batch)

    failed: list[ScheduledBatch] = []
    real = QueueingRunner.launch
    monkeypatch.setattr(QueueingRunner, "launch", launch)
    engine = ModelledEngine(FLAT, 2, ChanceDrafts(1.0, [1.0, 1.0], seed=1))
    assert engine.run(64).shape == (2, 64)  # no request ended before
    assert 0 < len(failed) < 16, "drafts that cost two attempts do not pay"
    stats = engine.scheduler.stats()
    assert stats.num_drafts == stats.num_accepted_draft_tokens == 0


SMALL_CPU = [(1, 0.06), (2, 0.066), (4, 0.08), (8, 0.11), (16, 0.2), (600, 6.0)]
CATCH_UP_S = 0.009  # of a draft model, for a token that it lacks
MOST_CAUGHT_UP, FEW = 16, 16  # tokens that it lacks: of a step, and not cut


class DraftingRunner(QueueingRunner):
    """Runner with a draft model that has read no prompt. Its drafts are right if `is_right`."""

    def __init__(self, clock: ModelledClock, table: Table, *, is_right: bool) -> None:
        super().__init__(clock, table)
        self._is_right = is_right
        self._num_cached = np.zeros(64, dtype=np.int64)

    def launch(self, batch: ScheduledBatch) -> QueuedStep:
        self._num_cached[[new.row for new in batch.new_rows]] = 0
        step = super().launch(batch)
        if not len(batch.draft_tokens):
            return step
        drafts, left = batch.draft_tokens.copy(), MOST_CAUGHT_UP
        for row in np.unique(batch.rows[drafts == TO_DRAFT]):
            entries = np.flatnonzero((batch.rows == row) & (drafts == TO_DRAFT))
            missing = int(batch.start_positions[entries[0]] - self._num_cached[row])
            done = missing if missing <= FEW else min(missing, left)
            left -= done * (missing > FEW)
            self._free_at += CATCH_UP_S * done
            self._num_cached[row] += done
            known = answer(batch.rows[entries], batch.start_positions[entries])
            drafts[entries] = known + (not self._is_right) if done == missing else NOT_DRAFTED
        sampled = dataclasses.replace(step.sampled, draft_tokens=drafts, has_caught_up=left < MOST_CAUGHT_UP)
        return step._replace(sampled=sampled, ends_at=self._free_at)


def drafting(num_rows: int, *, is_right: bool) -> ModelledEngine:
    runner = partial(DraftingRunner, is_right=is_right)
    return ModelledEngine(SMALL_CPU, num_rows, RunnerDrafts(MOST), runner=runner, max_inflight_steps=1)


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("is_right", [True, False])
def test_catching_up_with_long_contexts_makes_no_request_late(num_rows: int, is_right: bool) -> None:
    plain, engine = ModelledEngine(SMALL_CPU, num_rows, max_inflight_steps=1), drafting(num_rows, is_right=is_right)
    num_tokens, prompt = 200, 600
    expected = plain.run(num_tokens, prompt)
    runs = np.stack([engine.run(num_tokens, prompt) for _ in range(4)])
    step = (expected[0, -1] - expected[0, 0]) / (num_tokens - 1)
    late = (runs - expected) / step - SLACK * np.arange(num_tokens)
    assert late.max() < SLACK_TOKENS + CREDIT + MOST_CAUGHT_UP * CATCH_UP_S / step


def test_reading_is_not_taken_for_the_cost_of_drafts() -> None:
    engine = drafting(1, is_right=True)
    engine.run(200, prompt=600)
    cost = engine.goodput.cost
    assert cost.ratios(1, np.array([1], np.int32), 1)[0] == pytest.approx(seconds_of(SMALL_CPU, 2) / 0.06, rel=0.05)
