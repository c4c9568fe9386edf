"""Modelled engines for the controllers, without clock or computation; each `run_…` returns columns over time.

A step takes ``overhead + seconds per token · tokens + seconds per KV token · KV tokens read`` seconds, with a little
seeded noise.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeVar

from tidewheel.config import SchedulingSettings
from tidewheel.scheduler.controllers import SeqsGovernor, TpotController
from tidewheel.scheduler.strategy import DynamicStrategy, JoinView

SEED = 0
Trace = dict[str, list[float]]
Value = TypeVar("Value", int, float)
Schedule = tuple[tuple[float, Value], ...]  # (from this second on, value)


def at(schedule: Schedule[Value], now: float) -> Value:
    return [value for begin, value in schedule if begin <= now][-1]


def add(trace: Trace, *values: float) -> None:
    for column, value in zip(trace.values(), values, strict=True):
        column.append(value)


@dataclass(frozen=True, slots=True)
class StepModel:
    overhead_s: float = 0.008
    per_token_s: float = 40e-6
    per_kv_token_s: float = 80e-9
    noise: float = 0.03  # relative, uniform to both sides

    def seconds(self, num_tokens: int, num_kv_tokens: float, chance: random.Random) -> float:
        exact = self.overhead_s + self.per_token_s * num_tokens + self.per_kv_token_s * num_kv_tokens
        return exact * (1.0 + self.noise * (2.0 * chance.random() - 1.0))


@dataclass(frozen=True, slots=True)
class TpotScenario:
    """Load whose waiting prompts fill every step's budget."""

    model: StepModel = StepModel()
    max_budget: int = 2048
    min_budget: int = 129
    kv_tokens_per_row: int = 1024
    rows: Schedule[int] = ((0.0, 32), (8.0, 128))  # decoding rows by time
    targets: Schedule[float] = ((0.0, 0.050), (16.0, 0.030), (24.0, 0.060))
    seconds: float = 32.0


def run_tpot(scenario: TpotScenario) -> Trace:
    chance, now = random.Random(SEED), 0.0
    controller = TpotController(at(scenario.targets, 0.0), scenario.max_budget, scenario.min_budget)
    trace: Trace = {name: [] for name in ("seconds", "budget_tokens", "tpot_ms", "target_ms", "rows")}
    while now < scenario.seconds:
        controller.target_s, rows = at(scenario.targets, now), at(scenario.rows, now)
        budget = controller.budget
        step = scenario.model.seconds(budget, rows * scenario.kv_tokens_per_row, chance)
        now += step
        controller.observe(step, rows, budget)
        add(trace, now, budget, 1e3 * step, 1e3 * controller.target_s, rows)
    return trace


@dataclass(frozen=True, slots=True)
class GovernorScenario:
    """Load beyond what may run, whose lengths change over time."""

    model: StepModel = StepModel(overhead_s=0.010, per_token_s=150e-6)
    max_num_seqs: int = 256
    pool_tokens: int = 60_000
    prompt_tokens: int = 256
    mean_outputs: Schedule[float] = ((0.0, 200.0), (80.0, 600.0), (200.0, 200.0))
    targets: Schedule[float] = ((0.0, 1.0), (280.0, 0.025))  # seconds of a step
    seconds: float = 340.0


@dataclass(slots=True)
class Rows:
    chance: random.Random
    held: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def enter(self, prompt: int, mean_output: float) -> None:
        self.held.append(prompt)
        self.left.append(self.chance.randint(1, round(2 * mean_output)))

    def step(self) -> None:
        alive = [index for index, left in enumerate(self.left) if left > 1]
        self.held = [self.held[index] + 1 for index in alive]
        self.left = [self.left[index] - 1 for index in alive]

    def preempt_youngest(self) -> None:
        self.held.pop()
        self.left.pop()


def run_governor(scenario: GovernorScenario, governed: bool = True) -> Trace:
    chance, now = random.Random(SEED), 0.0
    rows, num_preempted = Rows(chance), 0
    governor = SeqsGovernor(scenario.max_num_seqs, at(scenario.targets, 0.0))
    names = ("seconds", "max_num_seqs", "running", "kv_use_percent", "step_ms", "target_ms", "preemptions")
    trace: Trace = {name: [] for name in names}
    while now < scenario.seconds:
        governor.target_s = at(scenario.targets, now)
        limit = governor.max_num_seqs if governed else scenario.max_num_seqs
        used = sum(rows.held)
        while len(rows.held) < limit and used + scenario.prompt_tokens < 0.99 * scenario.pool_tokens:
            rows.enter(scenario.prompt_tokens, at(scenario.mean_outputs, now))
            used += scenario.prompt_tokens
        step = scenario.model.seconds(len(rows.held), used, chance)
        now += step
        rows.step()
        while sum(rows.held) > scenario.pool_tokens:
            rows.preempt_youngest()
            num_preempted += 1
        usage = sum(rows.held) / scenario.pool_tokens
        governor.observe(now, step, len(rows.held), usage, 1.0)
        add(trace, now, limit, len(rows.held), 1e2 * usage, 1e3 * step, 1e3 * governor.target_s, num_preempted)
    return trace


@dataclass(frozen=True, slots=True)
class WindowScenario:
    """Load of Poisson arrivals; a joining batch costs all others a prefill step."""

    model: StepModel = StepModel(overhead_s=0.010, per_token_s=40e-6)
    prompt_tokens: int = 128
    arrivals_per_s: Schedule[float] = ((0.0, 40.0), (60.0, 110.0), (140.0, 40.0))
    target_latency_s: float = 0.080
    life_s: float = 1.0
    max_num_seqs: int = 256
    seconds: float = 220.0


def run_window(scenario: WindowScenario) -> Trace:
    chance, now = random.Random(SEED), 0.0
    strategy = DynamicStrategy(SchedulingSettings(batch_target_latency_ms=1e3 * scenario.target_latency_s))
    names = ("seconds", "window_ms", "latency_ms", "smoothed_ms", "batch_size", "arrivals_per_s")
    trace: Trace = {name: [] for name in names}
    waiting: list[float] = []
    ends: list[float] = []
    next_arrival = 0.0
    while now < scenario.seconds:
        rate = at(scenario.arrivals_per_s, now)
        while next_arrival <= now:
            waiting.append(next_arrival)
            next_arrival += chance.expovariate(rate)
        ends = [end for end in ends if end > now]
        oldest = waiting[0] if waiting else now
        joins = strategy.max_joins(now, JoinView(len(ends), len(waiting), oldest, scenario.max_num_seqs))
        now += scenario.model.seconds(len(ends) + joins * scenario.prompt_tokens, 0.0, chance)
        if joins:
            strategy.joined(joins)
            strategy.observe_batch(now - oldest)
            ends += [now + scenario.life_s] * joins
            del waiting[:joins]
            add(trace, now, 1e3 * strategy.window_s, 1e3 * (now - oldest), 1e3 * strategy.latency_s, joins, rate)
    return trace
