"""What waiting for tokens to draft from may cost where steps are launched ahead."""

from __future__ import annotations

import numpy as np
import pytest

from support.scheduler.ahead_runner import (
    APPLY_S,
    LAUNCH_S,
    ChanceDrafts,
    FloatArray,
    ModelledEngine,
    Table,
    seconds_of,
)
from tidewheel.batch import RowArray
from tidewheel.scheduler.controllers import StepControl
from tidewheel.scheduler.goodput import CREDIT, SLACK, SLACK_TOKENS, WAIT_CREDIT
from tidewheel.scheduler.speculation import Proposals
from tidewheel.scheduler.step_plan import StepLimits

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
