"""Drafts of a step by goodput: what they cost, how often they are accepted, and who pays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.batch import Int32Array
from tidewheel.scheduler import goodput as module
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.goodput import CREDIT, SLACK, SLACK_TOKENS, AcceptanceRates, DecodeCost, DecodeStep, Goodput
from tidewheel.scheduler.prompt_lookup import MATCH_KINDS
from tidewheel.scheduler.speculation import (
    COPIED_KIND,
    FORCED_KIND,
    NUM_OTHER_KINDS,
    NUMBER_KIND,
    REPEATED_KIND,
    RunnerDrafts,
    Speculation,
)
from tidewheel.stats import EngineStats

# SmolLM2-135M on two cores, and a small model on a GPU.
CPU = [(1, 0.0077), (2, 0.0077), (4, 0.0078), (8, 0.0095), (16, 0.0146), (32, 0.026), (64, 0.05), (128, 0.1)]
GPU = [(1, 0.005), (8, 0.0051), (32, 0.0054), (64, 0.0058), (128, 0.0066)]
Table = Sequence[tuple[int, float]]


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def seconds_of(table: Table, num_entries: int) -> float:
    sizes, seconds = np.log(table).T
    return math.exp(np.interp(math.log(num_entries), sizes, seconds))


def ratio(cost: DecodeCost, num_rows: int, num_drafts: int, most_drafts: int = 1) -> float:
    return float(cost.ratios(num_rows, ints(num_drafts), most_drafts)[0])


class TestDecodeCost:
    def test_a_measured_step_costs_what_was_measured(self) -> None:
        cost = DecodeCost(576, CPU)
        assert cost.seconds(16) == pytest.approx(0.0146)
        assert ratio(cost, 1, 7) == pytest.approx(0.0095 / 0.0077)
        assert ratio(cost, 64, 64) == pytest.approx(2.0)

    def test_sizes_between_are_interpolated_and_larger_ones_are_in_proportion(self) -> None:
        cost = DecodeCost(576, CPU)
        assert 0.0146 < cost.seconds(24) < 0.026
        assert cost.seconds(512) == pytest.approx(0.4)

    def test_sizes_need_not_be_powers_of_two(self) -> None:
        cost = DecodeCost(64, [(1, 0.01), (6, 0.02), (24, 0.04)])
        assert cost.seconds(4) == pytest.approx(0.01 * 2 ** (math.log(4) / math.log(6)), rel=1e-6)
        assert cost.seconds(64) == pytest.approx(0.04 * 64 / 24)

    def test_without_a_measurement_it_learns(self) -> None:
        cost = DecodeCost(16)
        for _ in range(30):
            cost.observe(DecodeStep(1), 0.1)
            cost.observe(DecodeStep(1, 7, 7), 0.3)
        assert cost.seconds(1) == pytest.approx(0.1, rel=0.05)
        assert ratio(cost, 1, 7, 7) == pytest.approx(3.0, rel=0.1)

    @pytest.mark.parametrize("step", [DecodeStep(8), DecodeStep(8, 24, 3)])
    def test_a_busy_neighbour_is_followed_within_20_steps_and_is_no_cost_of_drafts(self, step: DecodeStep) -> None:
        cost = DecodeCost(576, CPU)
        for _ in range(20):
            cost.observe(DecodeStep(8), seconds_of(CPU, 8))
            cost.observe(DecodeStep(8, 24, 3), seconds_of(CPU, 32))
        busy = 3.0
        for _ in range(20):
            cost.observe(step, busy * seconds_of(CPU, step.num_rows + step.num_drafts))
        assert cost.seconds(8) == pytest.approx(busy * 0.0095, rel=0.1)
        assert ratio(cost, 8, 24, 3) == pytest.approx(0.026 / 0.0095, rel=0.1)

    @pytest.mark.parametrize("step", [DecodeStep(8), DecodeStep(8, 24, 3)])
    def test_a_pause_does_not_mislead(self, step: DecodeStep) -> None:
        cost = DecodeCost(576, CPU)
        usual = seconds_of(CPU, step.num_rows + step.num_drafts)
        for _ in range(20):
            cost.observe(step, usual)
        cost.observe(step, 20.0 * usual)
        assert ratio(cost, 8, 24, 3) == pytest.approx(0.026 / 0.0095, rel=0.06)
        assert cost.seconds(8) < 1.4 * 0.0095

    def test_one_slow_step_with_drafts_after_many_without_is_forgotten(self) -> None:
        """Prompt lookup makes no trials: an estimate that stays would end drafts for good."""
        cost = DecodeCost(64, CPU)
        for _ in range(5000):
            cost.observe(DecodeStep(1), 0.0077)
        cost.observe(DecodeStep(1, 4, 4), 0.1)
        for _ in range(1000):
            cost.observe(DecodeStep(1), 0.0077)
        assert ratio(cost, 1, 4, 4) < 1.5

    def test_it_learns_what_drafts_cost_besides_their_entries(self) -> None:
        cost = DecodeCost(576, GPU)
        for _ in range(20):
            cost.observe(DecodeStep(4), seconds_of(GPU, 4))
            cost.observe(DecodeStep(4, 16, 4), 1.4 * seconds_of(GPU, 20))
        assert ratio(cost, 4, 16, 4) == pytest.approx(1.4 * seconds_of(GPU, 20) / seconds_of(GPU, 4), rel=0.05)

    def test_it_tells_waiting_from_drafts(self) -> None:
        cost = DecodeCost(576, GPU)
        for _ in range(30):
            cost.observe(DecodeStep(4), seconds_of(GPU, 4))
            cost.observe(DecodeStep(4, has_waited=True), 1.3 * seconds_of(GPU, 4))
            cost.observe(DecodeStep(4, 16, 4, has_waited=True), 1.3 * 1.2 * seconds_of(GPU, 20))
        assert cost.wait == pytest.approx(0.3, abs=0.02)
        assert ratio(cost, 4, 16, 4) == pytest.approx(1.56 * seconds_of(GPU, 20) / seconds_of(GPU, 4), rel=0.05)

    def test_drafts_never_make_a_step_cheaper(self) -> None:
        cost = DecodeCost(64, GPU)
        for _ in range(20):
            cost.observe(DecodeStep(4), 0.01)
            cost.observe(DecodeStep(4, 4, 1), 0.001)
        assert ratio(cost, 4, 4) == 1.0


class TestAcceptanceRates:
    def test_a_kind_is_shared_by_all_rows(self) -> None:
        rates = AcceptanceRates(2)
        for _ in range(100):
            rates.observe(ints(0), ints(3), ints(1), ints(0))
        assert rates.rates(ints(1, 1), ints(3, 4)) == pytest.approx([0.04, 0.5], abs=0.01)

    def test_a_row_departs_from_its_kind_within_few_tests(self) -> None:
        rates = AcceptanceRates(2)
        for _ in range(200):
            rates.observe(ints(0, 1), ints(3, 3), ints(1, 1), ints(1, 0))
        good, bad = rates.rates(ints(0, 1), ints(3, 3))
        assert good > 0.8
        assert bad < 0.2
        for _ in range(10):
            rates.observe(ints(0), ints(3), ints(1), ints(0))
        assert rates.rates(ints(0), ints(3))[0] < 0.4

    def test_failures_after_short_matches_say_little_of_long_ones(self) -> None:
        rates = AcceptanceRates(2)
        for _ in range(100):
            rates.observe(ints(0, 1), ints(7, 0), ints(8, 1), ints(8, 0))
        assert rates.rates(ints(1), ints(7))[0] > 0.9

    def test_a_new_request_begins_with_its_kind(self) -> None:
        rates = AcceptanceRates(2)
        for _ in range(20):
            rates.observe(ints(0, 1), ints(3, 3), ints(1, 1), ints(1, 0))
        rates.enter(1)
        assert rates.rates(ints(1), ints(3))[0] == pytest.approx(0.5, abs=0.1)

    def test_several_drafts_count_as_several_tests(self) -> None:
        rates = AcceptanceRates(1)
        rates.observe(ints(0), ints(3), ints(9), ints(8))
        many = rates.rates(ints(0), ints(3))[0]
        rates.enter(0)
        assert many > rates.rates(ints(0), ints(3))[0] > 0.5


def learned(table: Table, num_rows: int, rate: Sequence[float], *, most: int = 8, explores: bool = False) -> Goodput:
    """Return a choice for rows with so many accepted of 100 drafts each, of kind 3."""
    chooser = Goodput(num_rows, most, table, explores=explores)
    rows, kinds, ones = np.arange(num_rows), np.full(num_rows, 3, np.int32), np.ones(num_rows, np.int32)
    chooser.classes[:] = 2
    random = np.random.default_rng(1)
    for _ in range(100):
        chooser.observe_drafts(rows, kinds, ones, (random.random(num_rows) < np.array(rate)).astype(np.int32))
    return chooser


def choose(chooser: Goodput, num_rows: int, counts: int = 8, budget: int = 1000) -> Int32Array:
    full = np.full(num_rows, counts, np.int32)
    return chooser.choose(np.arange(num_rows), full, np.full(num_rows, 3, np.int32), budget)


class TestChoice:
    def test_drafts_that_cost_little_and_are_mostly_accepted_are_all_taken(self) -> None:
        assert choose(learned(GPU, 1, [0.95]), 1).tolist() == [8]

    def test_a_row_takes_fewer_the_less_they_are_accepted(self) -> None:
        numbers = [int(choose(learned(CPU, 1, [rate]), 1)[0]) for rate in (0.3, 0.6, 0.95)]
        assert numbers == sorted(numbers)
        assert numbers[0] < numbers[-1]

    def test_where_a_step_takes_as_long_as_its_entries_none_is_taken(self) -> None:
        assert not choose(learned(CPU, 64, [0.8] * 64), 64).any()

    def test_none_is_taken_if_the_gain_is_within_the_errors(self) -> None:
        assert not choose(learned(GPU, 8, [0.01] * 8), 8).any()

    def test_a_step_that_waits_for_nothing_is_charged(self) -> None:
        chooser = learned(GPU, 2, [0.95] * 2)
        for _ in range(20):
            chooser.observe_step(np.arange(2), ints(1, 1), DecodeStep(2), seconds_of(GPU, 2))
        for _ in range(5):
            chooser.observe_step(np.arange(2), ints(1, 1), DecodeStep(2, has_waited=True), 1.2 * seconds_of(GPU, 2))
        assert chooser.balances == pytest.approx([-1.0] * 2, abs=0.1)

    def test_the_most_probable_come_first(self) -> None:
        chosen = choose(learned(GPU, 4, [0.95, 0.4, 0.95, 0.4]), 4)
        assert min(chosen[0], chosen[2]) > max(chosen[1], chosen[3])

    @pytest.mark.parametrize("budget", [0, 1, 5, 64])
    def test_counts_and_budget_are_kept(self, budget: int) -> None:
        chooser = learned(GPU, 4, [0.95] * 4)
        counts = ints(0, 1, 8, 3)
        chosen = chooser.choose(np.arange(4), counts, np.full(4, 3, np.int32), budget)
        assert (chosen <= counts).all()
        assert chosen.sum() == min(budget, 12)
        assert chosen.dtype == np.int32

    def test_no_proposals_no_drafts(self) -> None:
        assert choose(learned(GPU, 4, [0.95] * 4), 4, counts=0).tolist() == [0] * 4

    def test_one_of_many_classes_is_chosen_without_the_drafts_of_lower_ones(self) -> None:
        chooser = learned(CPU, 4, [0.95] * 4)
        chooser.classes[3] = 3
        chooser.balances[:3] = -0.5  # a lower class may not add to that
        chosen = choose(chooser, 4)
        assert chosen[:3].all()
        assert not chosen[3]

    def test_a_clock_that_stands_still_is_no_measurement(self) -> None:
        chooser = learned(GPU, 2, [0.95] * 2)
        before = chooser.cost.seconds(1)
        chooser.observe_step(np.arange(2), ints(1, 4), DecodeStep(2, 3, 3), 0.0)
        assert chooser.cost.seconds(1) == before
        assert chooser.balances[1] > 2.0 > 1.0 > chooser.balances[0]


class TestTrials:
    def run(self, chooser: Goodput, num_steps: int, num_rows: int, *, accepts: bool) -> list[int]:
        """Return the steps with drafts."""
        drafted, rows = [], np.arange(num_rows)
        for step in range(num_steps):
            chosen = choose(chooser, num_rows)
            num_drafts = int(chosen.sum())
            if num_drafts:
                drafted.append(step)
                tried = rows[chosen > 0]
                right = chosen[tried] if accepts else 0 * chosen[tried]
                tested = np.minimum(right + 1, chosen[tried])
                chooser.observe_drafts(tried, np.full(len(tried), 3, np.int32), tested, right)
            size = DecodeStep(num_rows, num_drafts, int(chosen.max()))
            tokens = 1 + (chosen if accepts else 0 * chosen)
            chooser.observe_step(rows, tokens, size, seconds_of(GPU, num_rows + num_drafts))
        return drafted

    def test_drafts_that_did_not_pay_are_tried_again_ever_more_seldom(self) -> None:
        drafted = self.run(learned(GPU, 8, [0.0] * 8, explores=True), 500, 8, accepts=False)
        assert 2 <= len(drafted) <= 6
        gaps = np.diff(drafted)
        assert (gaps[1:] > gaps[:-1]).all()

    def test_drafts_that_begin_to_be_accepted_are_found_by_trials(self) -> None:
        drafted = self.run(learned(GPU, 8, [0.0] * 8, explores=True), 1500, 8, accepts=True)
        assert drafted[-100:] == list(range(1400, 1500))

    def test_free_proposals_are_not_tried(self) -> None:
        assert not self.run(learned(GPU, 8, [0.0] * 8), 200, 8, accepts=False)

    def test_a_trial_has_the_rows_whose_last_test_is_oldest(self) -> None:
        chooser, rows = learned(GPU, 8, [0.0] * 8, explores=True), np.arange(8)
        tried: list[int] = []
        for _ in range(2000):
            chosen = choose(chooser, 8, budget=2)
            tested = rows[chosen > 0]
            tried += tested.tolist()
            chooser.observe_drafts(
                tested, np.full(len(tested), 3, np.int32), np.ones_like(chosen[tested]), 0 * tested
            )
            size = DecodeStep(8, int(chosen.sum()), int(chosen.max()))
            chooser.observe_step(rows, np.ones(8, np.int32), size, seconds_of(GPU, 8 + size.num_drafts))
        assert set(tried[:8]) == set(range(8))

    def test_rows_that_cannot_pay_allow_no_trial(self) -> None:
        chooser = learned(GPU, 8, [0.0] * 8, explores=True)
        chooser.balances[5] = -5.0
        assert not self.run(chooser, 100, 8, accepts=False)


class Life:
    """Rows of random classes whose drafts are accepted at random, in steps of random seconds."""

    def __init__(self, seed: int, num_rows: int, table: Table, noise: float) -> None:
        self.random = np.random.default_rng(seed)
        self.num_rows, self.table, self.noise = num_rows, table, noise
        self.chooser = Goodput(num_rows, 8, table, explores=bool(seed % 2))
        self.classes = self.chooser.classes
        self.overhead = float(self.random.uniform(1.0, 1.5)) if noise else 1.0
        self.num_with_drafts = 0
        for row in range(num_rows):
            self.enter(row)

    def enter(self, row: int) -> None:
        self.classes[row] = self.random.integers(1, 5)
        self.chooser.enter(row)

    def step(self) -> None:
        chooser, random = self.chooser, self.random
        if random.random() < 0.02:
            self.enter(int(random.integers(self.num_rows)))
        rows = np.flatnonzero(random.random(self.num_rows) < 0.9)
        if not len(rows):
            return
        counts = (random.integers(0, 9, len(rows)) * (random.random(len(rows)) < 0.8)).astype(np.int32)
        kinds = random.integers(0, 8, len(rows)).astype(np.int32)
        chosen = chooser.choose(rows, counts, kinds, int(random.integers(0, 65)))
        rate = 0.9 if rows[0] % 2 else 0.3
        right = np.minimum(random.geometric(1.0 - rate, len(rows)) - 1, chosen).astype(np.int32)
        num_drafts, most = int(chosen.sum()), int(chosen.max())
        expected = ratio(chooser.cost, len(rows), num_drafts, most) if num_drafts else 1.0
        before, tokens_before = chooser.balances[rows], chooser.num_tokens[rows]
        tried = chosen > 0
        tested = np.minimum(right + 1, chosen)[tried]
        chooser.observe_drafts(rows[tried], kinds[tried], tested, right[tried])
        seconds = seconds_of(self.table, len(rows) + num_drafts) * (self.overhead if num_drafts else 1.0)
        seconds *= math.exp(self.noise * random.standard_normal())
        chooser.observe_step(rows, right + 1, DecodeStep(len(rows), num_drafts, most), seconds)
        paid = before + right + 1 - chooser.balances[rows]
        self.check(rows, chosen, tokens_before, paid - expected)

    def check(self, rows: Int32Array, chosen: Int32Array, num_tokens: Int32Array, unexpected: Int32Array) -> None:
        if not chosen.any():
            assert unexpected == pytest.approx(0.0)
            return
        self.num_with_drafts += 1
        classes = self.classes[rows]
        slack = np.where(classes >= classes[chosen > 0].max(), SLACK_TOKENS + SLACK * num_tokens, 0.0)
        least = -slack - CREDIT * (chosen > 0) - np.maximum(unexpected, 0.0)
        assert (self.chooser.balances[rows] >= least - 1e-6).all()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 12), table=st.sampled_from([CPU, GPU]),
    noise=st.sampled_from([0.0, 0.1, 0.5]),
)  # fmt: skip
def test_no_request_pays_more_than_its_slack(seed: int, num_rows: int, table: Table, noise: float) -> None:
    life = Life(seed, num_rows, table, noise)
    for _ in range(100):
        life.step()


def test_the_lives_of_the_property_have_steps_with_drafts() -> None:
    life = Life(3, 8, GPU, 0.1)
    for _ in range(300):
        life.step()
    assert life.num_with_drafts > 30


def test_a_planted_choice_that_forgets_the_balances_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Goodput, "_most_ratio", lambda *_: math.inf)
    life = Life(3, 8, CPU, 0.0)
    with pytest.raises(AssertionError):
        for _ in range(300):
            life.step()


def tokens_per_second(table: Table, num_rows: int, rate: float, fixed: int | None, busy: float) -> float:
    """Return the pace of rows that always have eight proposals, with a fixed number of drafts or those chosen."""
    random = np.random.default_rng(7)
    chooser = Goodput(num_rows, 8, table)
    rows, kinds, counts = np.arange(num_rows), np.full(num_rows, 3, np.int32), np.full(num_rows, 8, np.int32)
    num_tokens, elapsed = 0, 0.0
    for step in range(400):
        chosen = chooser.choose(rows, counts, kinds, 1000) if fixed is None else np.full(num_rows, fixed, np.int32)
        right = np.minimum(random.geometric(1.0 - rate, num_rows) - 1, 8).astype(np.int32)
        accepted, num_drafts = np.minimum(right, chosen), int(chosen.sum())
        tested = np.maximum(np.minimum(accepted + 1, chosen), 1)
        chooser.observe_drafts(rows, kinds, tested, np.minimum(right, tested))
        seconds = seconds_of(table, min(num_rows + num_drafts, table[-1][0])) * (busy if step > 200 else 1.0)
        seconds *= max((num_rows + num_drafts) / table[-1][0], 1.0)
        size = DecodeStep(num_rows, num_drafts, int(chosen.max()))
        chooser.observe_step(rows, accepted + 1, size, seconds * math.exp(0.05 * random.standard_normal()))
        num_tokens, elapsed = num_tokens + int(accepted.sum()) + num_rows, elapsed + seconds
    return num_tokens / elapsed


@pytest.mark.parametrize("table", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("num_rows", [1, 4, 64])
def test_it_is_about_as_fast_as_the_best_number_and_not_slower_than_none(
    table: Table, rate: float, num_rows: int
) -> None:
    paces = [tokens_per_second(table, num_rows, rate, fixed, 2.0) for fixed in (0, 1, 2, 3, 4, 6, 8)]
    chosen = tokens_per_second(table, num_rows, rate, None, 2.0)
    assert chosen > 0.98 * paces[0]
    assert chosen > 0.93 * max(paces)


def test_the_class_of_a_row_follows_that_of_a_running_request() -> None:
    columns, chooser = RowColumns(2), Goodput(2, 1)
    Speculation(RunnerDrafts(1), chooser, 1, columns, EngineStats())
    columns.classes[1] = 4
    assert chooser.classes.tolist() == [0, 4]


def test_the_class_of_a_row_is_that_of_the_request_in_it() -> None:
    chooser = learned(CPU, 2, [0.95, 0.0])
    rows, counts, kinds = np.arange(2), ints(8, 0), ints(3, 3)
    chooser.classes[1] = 1
    assert not chooser.choose(rows, counts, kinds, 8).any()  # a higher class beside it has nothing to give
    chooser.classes[1] = 2
    assert chooser.choose(rows, counts, kinds, 8)[0]


def test_kinds_are_those_of_proposals() -> None:
    of_lookup = [0, *MATCH_KINDS.tolist()]
    of_grammars = [kind + NUM_OTHER_KINDS for kind in of_lookup]
    kinds = {*of_lookup, *of_grammars, COPIED_KIND, NUMBER_KIND, FORCED_KIND, REPEATED_KIND}
    assert kinds == set(range(module.NUM_KINDS))
    assert max(of_lookup) < min(of_grammars) <= max(of_grammars) < COPIED_KIND
