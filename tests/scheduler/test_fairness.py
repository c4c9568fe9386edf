"""The virtual token counter: fair shares, no saved-up service, bounded memory."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.scheduler import tenancy
from tidewheel.scheduler.tenancy import INPUT_WEIGHT, OUTPUT_WEIGHT, VirtualCounters


def same_weight(tenant: str) -> float:
    return 1.0


def test_prompt_and_output_tokens_are_charged_by_weight() -> None:
    counters = VirtualCounters({"a": 1.0, "b": 4.0}.__getitem__)
    counters.charge("a", 10, 3)
    counters.charge("b", 10, 3)
    assert counters.counter("a") == 16.0
    assert counters.counter("b") == 4.0


def test_the_least_served_is_next_and_a_draw_goes_to_who_waits_longer() -> None:
    counters = VirtualCounters(same_weight)
    assert counters.least() is None
    for tenant in "ab":
        counters.activate(tenant)
    assert counters.least() == "a"
    counters.charge("a", 1, 0)
    assert counters.least() == "b"
    counters.charge("b", 2, 0)
    assert counters.least() == "a"
    counters.deactivate("a")
    assert counters.least() == "b"


def test_who_stays_away_saves_nothing_up() -> None:
    counters = VirtualCounters(same_weight)
    counters.activate("busy")
    counters.charge("busy", 1000, 0)
    counters.activate("late")
    assert counters.counter("late") == 1000.0


def test_after_a_pause_of_all_the_last_one_sets_the_start() -> None:
    counters = VirtualCounters(same_weight)
    counters.activate("a")
    counters.charge("a", 500, 0)
    counters.deactivate("a")
    counters.charge("a", 0, 50)  # its requests are still running
    counters.activate("b")
    assert counters.counter("b") == 600.0


def test_who_is_ahead_stays_ahead() -> None:
    counters = VirtualCounters(same_weight)
    counters.activate("a")
    counters.activate("b")
    counters.charge("a", 500, 0)
    counters.deactivate("a")
    counters.activate("a")
    assert (counters.counter("a"), counters.counter("b")) == (500.0, 0.0)


class Server:
    """Continuous batching of tenants that always have a request waiting: rows, random lengths, one token a step."""

    def __init__(self, weights: dict[str, float], num_rows: int, max_input: int, max_output: int, seed: int) -> None:
        self.counters = VirtualCounters(weights.__getitem__)
        self.random = random.Random(seed)
        self.num_rows, self.max_input, self.max_output = num_rows, max_input, max_output
        self.running: list[list[object]] = []  # tenant, output tokens left
        self.service = dict.fromkeys(weights, 0.0)
        for tenant in weights:
            self.counters.activate(tenant)

    def give(self, tenant: str, num_input: int, num_output: int) -> None:
        self.service[tenant] += INPUT_WEIGHT * num_input + OUTPUT_WEIGHT * num_output
        self.counters.charge(tenant, num_input, num_output)

    def step(self) -> None:
        while len(self.running) < self.num_rows:
            tenant = self.counters.least()
            assert tenant is not None
            self.give(tenant, self.random.randint(1, self.max_input), 0)
            self.running.append([tenant, self.random.randint(1, self.max_output)])
        for tenant, num in Counter(tenant for tenant, _ in self.running).items():
            self.give(tenant, 0, num)
        for row in self.running:
            row[1] -= 1
        self.running = [row for row in self.running if row[1]]


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=4),
    num_rows=st.integers(1, 8),
    max_input=st.integers(1, 200),
    max_output=st.integers(1, 60),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_two_backlogged_tenants_differ_by_no_more_than_the_bound_of_the_paper(
    weights: list[float], num_rows: int, max_input: int, max_output: int, seed: int
) -> None:
    """Over any interval, service over weight differs by at most 2U (Sheng et al., theorem 4.4, weighted)."""
    tenants = {str(number): weight for number, weight in enumerate(weights)}
    server = Server(tenants, num_rows, max_input, max_output, seed)
    most_tokens = num_rows * (max_input + max_output)  # M: the tokens that a running batch can hold
    bound = 2.0 * max(INPUT_WEIGHT * max_input, OUTPUT_WEIGHT * most_tokens) / min(weights)
    differences = []
    for _ in range(300):
        server.step()
        differences.append(server.service["0"] / tenants["0"] - server.service["1"] / tenants["1"])
    assert max(differences) - min(differences) <= bound


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.25)])
def test_shares_follow_the_weights(weight: float, share: float) -> None:
    server = Server({"small": 1.0, "big": weight}, num_rows=8, max_input=100, max_output=50, seed=1)
    for _ in range(3000):
        server.step()
    assert server.service["small"] / sum(server.service.values()) == pytest.approx(share, abs=0.02)


@given(st.lists(st.tuples(st.sampled_from("+-$"), st.sampled_from("abcd"), st.integers(0, 50)), max_size=60))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_heap_agrees_with_a_plain_search(calls: list[tuple[str, str, int]]) -> None:
    counters, active = VirtualCounters(same_weight), set()
    for call, tenant, tokens in calls:
        if call == "+":
            counters.activate(tenant)
            active.add(tenant)
        elif call == "-":
            counters.deactivate(tenant)
            active.discard(tenant)
        else:
            counters.charge(tenant, tokens, 0)
        least = counters.least()
        assert (least in active) if active else least is None
        if least is not None:
            assert counters.counter(least) == min(counters.counter(each) for each in active)


def test_memory_is_bounded_whatever_tenants_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "MAX_IDLE_TENANTS", 10)
    counters = VirtualCounters(same_weight)
    counters.activate("regular")
    for number in range(1000):
        tenant = f"visitor-{number}"
        counters.activate(tenant)
        counters.charge(tenant, number, 0)
        counters.deactivate(tenant)
        assert len(counters._counters) <= 11
    assert counters.counter("visitor-999") == 999.0  # the one that is furthest ahead is not let off
    assert len(counters._heap) < 100
