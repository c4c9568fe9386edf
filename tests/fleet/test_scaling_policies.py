"""The number of replicas: within its bounds, steady under steady load, more for more load, none only if wished."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.errors import ConfigError
from tidewheel.fleet.scaling import FleetState, ReplicaReport, ScalingPolicy, ScalingSettings
from tidewheel.request import Priority
from tidewheel.simulate.compared_policies import POLICIES
from tidewheel.simulate.fleet_choice import make_scaling

NAMES = tuple(POLICIES)
CAPACITY = 1000.0  # tokens per second of a replica
TOKENS = 100  # of a request
STEP_S = 15.0
KNOWN = {"replica_tokens_per_s": CAPACITY, "max_replicas": 20}


def policy(name: str = "reactive", **values: object) -> ScalingPolicy:
    return make_scaling(name, ScalingSettings(**values))  # type: ignore[arg-type]


class Fleet:
    """Replicas that start at once and share the work evenly; what they cannot compute waits."""

    def __init__(self, policy: ScalingPolicy, num_replicas: int = 1) -> None:
        self.policy = policy
        self.num_replicas = num_replicas
        self.now = 0.0
        self.num_arrivals = 0
        self.backlog = 0.0  # tokens
        self.waited_s = 0.0

    def step(self, requests_per_s: float) -> int:
        asked = requests_per_s * TOKENS
        room = self.num_replicas * CAPACITY
        done = min(asked + self.backlog / STEP_S, room)
        self.backlog = max(self.backlog + (asked - done) * STEP_S, 0.0)
        self.waited_s = self.backlog / room if room else 0.0
        self.now += STEP_S
        self.num_arrivals += round(requests_per_s * STEP_S)
        self.num_replicas = self.policy.decide(self.state(done))
        return self.num_replicas

    def state(self, tokens_per_s: float) -> FleetState:
        waiting = round(self.backlog / TOKENS)
        if not self.num_replicas:
            return FleetState(now=self.now, num_arrivals=self.num_arrivals, num_held=waiting)
        each = tokens_per_s / self.num_replicas
        share = [
            waiting // self.num_replicas + (index < waiting % self.num_replicas) for index in range(self.num_replicas)
        ]
        ready = tuple(
            ReplicaReport(
                name=str(index),
                waiting=count,
                running=math.ceil(each / CAPACITY),
                tokens_per_s=each,
                queue_s={Priority.NORMAL: self.waited_s if count else 0.0},
            )
            for index, count in enumerate(share)
        )
        return FleetState(now=self.now, ready=ready, num_arrivals=self.num_arrivals)

    def run(self, requests_per_s: float, seconds: float) -> list[int]:
        return [self.step(requests_per_s) for _ in range(round(seconds / STEP_S))]


reports = st.builds(
    ReplicaReport,
    name=st.sampled_from(["a", "b", "c"]),
    waiting=st.integers(0, 500),
    running=st.integers(0, 500),
    cache_usage=st.floats(0, 1),
    tokens_per_s=st.floats(0, 1e6),
    queue_s=st.dictionaries(st.sampled_from(list(Priority)), st.floats(0, 1e4)),
)
states = st.lists(
    st.tuples(
        st.floats(0, 1000),
        st.lists(reports, max_size=4),
        st.integers(0, 5),
        st.integers(0, 10_000),
        st.integers(0, 100),
    ),
    max_size=20,
)


@pytest.mark.parametrize("name", NAMES)
@given(states, st.integers(0, 3), st.integers(1, 6))
def test_never_outside_the_bounds(name: str, steps: list[tuple], least: int, span: int) -> None:  # type: ignore[type-arg]
    scaling = policy(name, min_replicas=least, max_replicas=least + span)
    now = arrivals = 0.0
    for seconds, ready, starting, more, held in steps:
        now, arrivals = now + seconds, arrivals + more
        state = FleetState(
            now=now, ready=tuple(ready), num_starting=starting, num_arrivals=int(arrivals), num_held=held
        )
        assert least <= scaling.decide(state) <= least + span


@pytest.mark.parametrize("name", ["reactive", "predictive"])
@pytest.mark.parametrize("values", [KNOWN, {"max_replicas": 20}], ids=["known", "learned"])
@pytest.mark.parametrize("requests_per_s", [1, 6, 13, 50, 77, 131])
def test_the_number_settles_under_constant_load(name: str, values: dict[str, float], requests_per_s: float) -> None:
    fleet = Fleet(policy(name, **values))
    fleet.run(requests_per_s, 3 * 3600)
    numbers = fleet.run(requests_per_s, 8 * 3600)
    assert len(set(numbers)) == 1
    assert fleet.backlog == 0
    assert numbers[0] <= requests_per_s * TOKENS / CAPACITY / 0.55 + 1


@settings(max_examples=20)
@given(st.floats(0.9, 1.1))
def test_a_load_within_the_hysteresis_changes_nothing(factor: float) -> None:
    """5 replicas at 62 % of their capacity: more are needed from 70 %, fewer will do below 44 %."""
    fleet = Fleet(policy(**KNOWN), 5)
    assert set(fleet.run(31, 1800)) == {5}
    assert set(fleet.run(31 * factor, 3600)) == {5}


load = st.fixed_dictionaries(
    {
        "waiting": st.integers(0, 100),
        "running": st.integers(0, 300),
        "tokens_per_s": st.floats(0, 5000),
        "cache_usage": st.floats(0, 1),
        "age": st.floats(0, 100),
        "arrivals": st.integers(0, 5000),
    }
)


def decision(values: dict[str, float], num_ready: int) -> int:
    scaling = policy(**KNOWN)
    names = ("waiting", "running", "tokens_per_s", "cache_usage")
    quiet = [ReplicaReport(name=str(index), running=1, tokens_per_s=100.0) for index in range(num_ready)]
    scaling.decide(FleetState(now=0.0, ready=tuple(quiet)))
    scaling.decide(FleetState(now=15.0, ready=tuple(quiet), num_arrivals=num_ready * 15))
    busy = dataclasses.replace(
        quiet[0], **{name: values[name] for name in names}, queue_s={Priority.HIGH: values["age"]}
    )
    arrivals = num_ready * 15 + int(values["arrivals"])
    return scaling.decide(FleetState(now=30.0, ready=(busy, *quiet[1:]), num_arrivals=arrivals))


@given(load, load, st.integers(1, 5))
def test_more_load_never_gives_fewer_replicas(one: dict[str, float], other: dict[str, float], num_ready: int) -> None:
    more = {name: max(one[name], other[name]) for name in one}
    assert decision(more, num_ready) >= decision(one, num_ready)


@pytest.mark.parametrize("name", ["reactive", "predictive"])
def test_a_burst_beyond_the_capacity_is_answered_by_one_decision(name: str) -> None:
    fleet = Fleet(policy(name, **KNOWN), 2)
    fleet.run(12, 3600)
    assert fleet.step(100) >= 4
    assert fleet.run(100, 60)[-1] >= 14  # 70 % of 1,000 tokens/s each


def test_arrivals_count_before_they_are_computed() -> None:
    """Sixty requests a second for 15 s, which no report of waiting requests or tokens tells yet."""
    scaling = policy(**KNOWN)
    calm = (ReplicaReport(name="a", running=1, tokens_per_s=500.0),)
    for step in range(20):
        state = FleetState(now=step * STEP_S, ready=calm, num_arrivals=step * 75)
        assert scaling.decide(state) == 1
    decided = scaling.decide(FleetState(now=20 * STEP_S, ready=calm, num_arrivals=19 * 75 + 900))
    assert decided == 3


def test_an_old_request_of_a_class_calls_for_a_replica_though_few_wait() -> None:
    scaling = policy(**KNOWN)
    calm = ReplicaReport(name="a", waiting=1, running=1, queue_s={Priority.LOW: 50.0, Priority.CRITICAL: 0.1})
    late = dataclasses.replace(calm, queue_s={Priority.LOW: 50.0, Priority.CRITICAL: 0.6})
    assert scaling.decide(FleetState(now=0.0, ready=(calm,))) == 1
    decided = scaling.decide(FleetState(now=1.0, ready=(late,)))
    assert decided == 2


def test_starting_replicas_count() -> None:
    """A queue that two starting replicas will serve does not call for more, however often it is asked."""
    scaling = policy(**KNOWN)
    full = ReplicaReport(name="a", waiting=20, running=10, tokens_per_s=700.0)
    assert scaling.decide(FleetState(now=0.0, ready=(full,))) == 2
    for second in range(1, 60):
        assert scaling.decide(FleetState(now=float(second), ready=(full,), num_starting=1)) == 2


def test_the_cache_calls_for_replicas() -> None:
    scaling = policy()
    ready = tuple(ReplicaReport(name=str(index), running=3, cache_usage=0.9) for index in range(2))
    assert scaling.decide(FleetState(now=0.0, ready=ready)) == 3


@pytest.mark.parametrize("name", ["reactive", "predictive", "queue-depth", "ongoing"])
def test_without_the_wish_one_replica_stays(name: str) -> None:
    fleet = Fleet(policy(name, max_replicas=5))
    assert fleet.run(0, 4 * 3600)[-1] == 1


def test_on_wish_none_stays_once_nothing_was_asked_for_a_while() -> None:
    fleet = Fleet(policy(min_replicas=0, idle_to_zero_s=900, scale_down_after_s=60))
    fleet.run(5, 1800)
    numbers = fleet.run(0, 3600)
    assert numbers[int(850 / STEP_S)] == 1
    assert numbers[-1] == 0


def test_a_fleet_of_none_stays_none_and_starts_with_the_first_request() -> None:
    scaling = policy(min_replicas=0)
    assert scaling.decide(FleetState(now=0.0)) == 0
    assert scaling.decide(FleetState(now=5000.0)) == 0
    assert scaling.decide(FleetState(now=5001.0, num_arrivals=1, num_held=1)) == 1


def test_fewer_only_after_they_were_enough_for_the_whole_time() -> None:
    fleet = Fleet(policy(**KNOWN, scale_down_after_s=600), 10)
    fleet.run(65, 1200)
    assert set(fleet.run(10, 540)) == {10}
    fleet.run(65, 300)
    assert set(fleet.run(10, 540)) == {10}
    assert fleet.run(10, 600)[-1] == 2


def test_a_cool_down_separates_a_change_from_fewer() -> None:
    fleet = Fleet(policy(**KNOWN, scale_down_after_s=0, cool_down_s=300), 5)
    fleet.run(31, 600)
    raised = fleet.run(70, 60)[-1]
    assert raised > 5
    assert set(fleet.run(1, 225)) == {raised}
    assert fleet.run(1, 300)[-1] < raised


@pytest.mark.parametrize("name", NAMES)
def test_the_same_states_give_the_same_decisions(name: str) -> None:
    def numbers() -> list[int]:
        fleet = Fleet(policy(name, max_replicas=20))
        return [fleet.step(abs(40 * math.sin(step / 50)) + step % 7) for step in range(1000)]

    assert numbers() == numbers()


def test_the_capacity_is_learned_from_replicas_whose_requests_wait() -> None:
    """It first scales by the queue, and later, at the same load, without one."""
    fleet = Fleet(policy(max_replicas=20))
    fleet.run(9, 1800)
    assert fleet.num_replicas == 1
    fleet.run(40, 3600)
    fleet.run(9, 3600)
    assert fleet.num_replicas <= 2
    for rate in range(9, 40):
        fleet.run(rate, 300)
        assert fleet.backlog == 0


def test_a_short_queue_keeps_the_replica_that_it_brought() -> None:
    """One report of a full replica is too little to plan with, but enough not to take back what it called for."""
    fleet = Fleet(policy(max_replicas=20))
    assert fleet.run(13, 1800)[-1] == 2
    assert fleet.backlog == 0
    assert set(fleet.run(13, 7200)) == {2}
    assert fleet.run(1, 1800)[-1] == 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"min_replicas": -1}, "min_replicas is -1: it must be 0 to 10000"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas is 2: it must be 3 to 10000"),
        ({"min_replicas": 0, "max_replicas": 0}, "max_replicas is 0: it must be 1 to 10000"),
        ({"utilisation": 1.5}, "utilisation is 1.5: it must be above 0"),
        ({"release_utilisation": 0.9}, "release_utilisation is 0.9: it must be above 0 and at most utilisation, 0.7"),
        ({"cache_usage": 0}, "cache_usage is 0: it must be above 0"),
        ({"startup_s": -1}, "startup_s is -1: it must be 0 or more"),
        ({"cool_down_s": math.inf}, "cool_down_s is inf"),
        ({"waiting_per_replica": 0}, "waiting_per_replica is 0: it must be at least 1"),
    ],
)
def test_wrong_settings_are_refused_by_name(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ScalingSettings(**values)  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="scaling is 'magic': choose one of reactive, predictive, queue-depth"):
        policy("magic")
