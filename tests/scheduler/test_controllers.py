"""The controllers stay in their limits and settle, on modelled engines."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.scheduler.controllers import (
    GOVERNOR_PERIOD_S,
    KV_HIGH,
    SeqsGovernor,
    TpotController,
)

TARGET_S = 0.05


def budget_after(controller: TpotController, seconds: float, num_decodes: int, num_tokens: int) -> int:
    controller.observe(seconds, num_decodes, num_tokens)
    return controller.budget


def limit_after(
    governor: SeqsGovernor, kv_usage: float, seconds: float, busy: float, num_running: int, now: float
) -> int:
    governor.observe(now, seconds, num_running, kv_usage, busy)
    return governor.max_num_seqs


@given(st.lists(st.tuples(st.floats(0.0, 1e3), st.integers(0, 300), st.integers(0, 4096)), max_size=100))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_budget_stays_in_its_limits(steps: list[tuple[float, int, int]]) -> None:
    controller = TpotController(TARGET_S, max_budget=2048, min_budget=64)
    assert controller.budget == 2048
    for seconds, decodes, tokens in steps:
        assert 64 <= budget_after(controller, seconds, decodes, tokens) <= 2048


def budgets(overhead: float, per_token: float, target: float, num_steps: int, delay: int = 1) -> list[int]:
    """Of an engine with more prompts than budget, whose answer comes `delay` steps late."""
    controller = TpotController(target, max_budget=4096, min_budget=32)
    seen = [4096] * delay
    for _ in range(num_steps):
        used = seen[-delay]
        seen.append(budget_after(controller, overhead + per_token * used, 16, used))
    return seen


@given(overhead=st.floats(0.0, 0.02), goal=st.floats(100.0, 3000.0), delay=st.sampled_from([1, 2]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_budget_settles_on_the_target_without_overshoot(overhead: float, goal: float, delay: int) -> None:
    per_token = (TARGET_S - overhead) / goal
    seen = budgets(overhead, per_token, TARGET_S, 150, delay)
    assert 0.93 * TARGET_S < overhead + per_token * seen[-1] <= 1.005 * TARGET_S
    assert min(seen) == seen[-1]  # it came from above, and did not fall through
    assert len(set(seen[-20:])) == 1


def test_a_target_that_cannot_be_met_leaves_the_least_budget_and_winds_nothing_up() -> None:
    controller = TpotController(TARGET_S, max_budget=2048, min_budget=64)
    for _ in range(1000):
        budget_after(controller, 0.5, 16, controller.budget)
    assert controller.budget == 64
    budget_after(controller, 0.01, 16, 64)
    assert controller.budget > 64  # the first good step is answered


def test_a_step_that_did_not_use_its_budget_does_not_raise_it() -> None:
    controller = TpotController(TARGET_S, max_budget=2048, min_budget=64)
    for _ in range(20):
        budget_after(controller, 0.1, 16, controller.budget)
    budget = controller.budget
    for _ in range(100):
        budget_after(controller, 0.01, 16, 16)
    assert controller.budget == budget
    assert budget_after(controller, 0.01, 16, budget) > budget


def test_a_step_without_decoding_rows_has_no_tpot() -> None:
    controller = TpotController(TARGET_S, max_budget=2048, min_budget=64)
    assert budget_after(controller, 10.0, 0, 2048) == 2048


def test_the_least_budget_is_never_above_the_largest() -> None:
    assert budget_after(TpotController(TARGET_S, max_budget=100, min_budget=200), 1.0, 1, 100) == 100


def test_a_higher_target_raises_the_budget_again() -> None:
    controller = TpotController(TARGET_S, max_budget=4096, min_budget=32)
    for target, goal in ((0.05, 400), (0.1, 900), (0.03, 200)):
        controller.target_s = target
        for _ in range(100):
            budget_after(controller, 0.01 + 1e-4 * controller.budget, 16, controller.budget)
        assert controller.budget == pytest.approx(0.95 * goal, rel=0.06)


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 1.0), st.floats(0.0, 9.0), st.floats(0.0, 1.0), st.integers(0, 64), st.floats(0.0, 2.0)
        ),
        max_size=100,
    ),
    st.integers(1, 64),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_governor_stays_in_its_limits(steps: list[tuple[float, float, float, int, float]], most: int) -> None:
    governor, now = SeqsGovernor(most, TARGET_S), 0.0
    for kv_usage, seconds, busy, running, gap in steps:
        now += gap
        assert 1 <= limit_after(governor, kv_usage, seconds, busy, running, now) <= most


def test_the_governor_decides_every_period() -> None:
    governor = SeqsGovernor(64)
    assert limit_after(governor, 0.95, 0.01, 1.0, 64, 0.0) == 57  # 64 · 0.85 / 0.95
    assert limit_after(governor, 1.0, 0.01, 1.0, 40, 0.9 * GOVERNOR_PERIOD_S) == 57
    assert limit_after(governor, 1.0, 0.01, 1.0, 40, GOVERNOR_PERIOD_S) == 34


def test_the_governor_does_not_lower_twice_for_the_same_requests() -> None:
    governor = SeqsGovernor(64)
    for number in range(20):  # they run on: the limit is answered only as they end
        assert limit_after(governor, 0.95, 0.01, 1.0, 64, float(number)) == 57


@pytest.mark.parametrize("kv_usage", [0.81, 0.85, 0.89])
def test_between_the_bands_nothing_moves(kv_usage: float) -> None:
    governor = SeqsGovernor(64)
    limit_after(governor, 1.0, 0.01, 1.0, 64, 0.0)
    assert limit_after(governor, kv_usage, 0.01, 0.5, 54, 1.0) == 54


def test_an_idle_device_raises_the_limit_to_the_full_again() -> None:
    governor = SeqsGovernor(64)
    limit_after(governor, 1.0, 0.01, 1.0, 64, 0.0)
    limits = [limit_after(governor, 0.01, 0.01, 0.3, 4, 30.0 + 30.0 * number) for number in range(10)]
    assert limits == [56, 58, 60, 62, 64, 64, 64, 64, 64, 64]


def test_the_limit_is_not_raised_to_where_the_blocks_would_not_reach() -> None:
    governor = SeqsGovernor(64)
    limit_after(governor, 1.0, 0.01, 1.0, 40, 0.0)
    limit_after(governor, 1.0, 0.01, 1.0, 20, 1.0)
    limits = [limit_after(governor, 0.6, 0.01, 0.3, 14, 2.0 + 30.0 * number) for number in range(3)]
    assert limits == [17, 19, 19]  # first as if each still held 5 % of the blocks, then 0.6 / 14


def test_a_busy_device_that_the_limit_does_not_hold_back_keeps_it() -> None:
    governor = SeqsGovernor(64)
    limit_after(governor, 1.0, 0.01, 1.0, 64, 0.0)
    assert limit_after(governor, 0.5, 0.01, 0.95, 30, 1.0) == 54


@dataclass
class Engine:
    """Rows that are always wanted; each holds more and more of the pool until it ends."""

    pool: float  # blocks
    most_blocks: float  # of a request at its end
    life_s: float = 10.0
    step_s: float = 0.05
    per_row_s: float = 0.0
    ages: list[float] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(11))

    def run(self, governor: SeqsGovernor, seconds: float) -> list[tuple[int, float, float]]:
        """Limit, KV use and step time after every step."""
        seen, now = [], 0.0
        while now < seconds:
            while len(self.ages) < governor.max_num_seqs and self.usage() < 1.0:
                self.ages.append(self.chance.random() * self.life_s)
            step = self.step_s + self.per_row_s * len(self.ages)
            now += step
            self.ages = [age + step for age in self.ages if age + step < self.life_s]
            while self.usage() > 1.0:
                self.ages.pop()
            limit = limit_after(governor, self.usage(), step, 1.0, len(self.ages), now)
            seen.append((limit, self.usage(), step))
        return seen

    def usage(self) -> float:
        return sum(self.ages) / self.life_s * self.most_blocks / self.pool


def turns(values: list[int]) -> int:
    """How often a series changes its direction."""
    moves = [b - a for a, b in pairwise(values) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(moves))


@pytest.mark.parametrize("most_blocks", [5.0, 10.0, 20.0])
def test_kv_use_settles_in_the_band(most_blocks: float) -> None:
    engine = Engine(pool=1000.0, most_blocks=most_blocks)
    seen = engine.run(SeqsGovernor(512), 120.0)[-1200:]
    limits = [limit for limit, _, _ in seen]
    usage = [used for _, used, _ in seen]
    assert 0.75 < sum(usage) / len(usage) < KV_HIGH
    assert max(usage) < 0.97
    assert turns(limits) <= 12  # a minute of random lives; every turn is a drift out of the band


@pytest.mark.parametrize("overhead", [0.01, 0.03])
def test_step_time_settles_under_its_target(overhead: float) -> None:
    engine = Engine(pool=1e9, most_blocks=1.0, step_s=overhead, per_row_s=2e-4)
    seen = engine.run(SeqsGovernor(512, TARGET_S), 120.0)[-1000:]
    assert all(0.85 * TARGET_S < step <= 1.02 * TARGET_S for _, _, step in seen)
    assert turns([limit for limit, _, _ in seen]) <= 2


@pytest.mark.parametrize("has_tpot", [True, False])
@pytest.mark.parametrize("has_governor", [True, False])
def test_each_controller_sets_its_own_limit(has_tpot: bool, has_governor: bool) -> None:
    driver = SchedulerDriver(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        target_tpot_ms=1e3 * TARGET_S if has_tpot else None,
        enable_seqs_governor=has_governor,
        governor_target_latency_ms=1e3 * TARGET_S if has_governor else None,
    )
    for number in range(8):
        driver.add(make_request(f"r{number}", max_tokens=8))
    for _ in range(3):
        driver.step()  # a second each, far over the target
    stats = driver.scheduler.stats()
    assert (stats.token_budget < 64, stats.max_num_seqs < 8) == (has_tpot, has_governor)
    driver.run()
