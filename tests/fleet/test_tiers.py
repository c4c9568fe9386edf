"""Tiers of replicas: cheap ones first, dear ones for what cheap ones have no room for, and back."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidewheel.fleet.router import RoutedRequest, RouteRequest
from tidewheel.fleet.routers import MEMORY, ROOM, PrefixAwareRouter, ReplicaTerms, TieredRouter
from tidewheel.fleet.scaling import QUEUE_LIMITS_S
from tidewheel.request import Priority

NEAR, FAR = "near", "far"
ROUND_TRIP_S = 0.25  # of far, exact in binary
NORMAL_S = QUEUE_LIMITS_S[Priority.NORMAL]


class Fleet:
    def __init__(self, **terms: ReplicaTerms) -> None:
        self.now = 0.0
        self.terms = terms or {NEAR: ReplicaTerms(0), FAR: ReplicaTerms(5, ROUND_TRIP_S)}
        self.router = TieredRouter[str](self.terms.__getitem__, lambda: self.now)
        for name in self.terms:
            self.router.join(name)

    def choose(self, excluded: tuple[str, ...] = (), **fields: object) -> str | None:
        return self.router.choose(RouteRequest(**fields), excluded)  # type: ignore[arg-type]

    def send(self, replica: str | None = None, **fields: object) -> RoutedRequest[str]:
        request = RouteRequest(**fields)  # type: ignore[arg-type]
        chosen = replica or self.router.choose(request)
        assert chosen is not None
        return self.router.chosen(request, chosen)

    def answer(self, routed: RoutedRequest[str], after_s: float = 0.0) -> None:
        self.now += after_s
        self.router.started(routed)
        self.router.ended(routed)

    def fill(self, replica: str = NEAR) -> list[RoutedRequest[str]]:
        """Send requests, of which the oldest has waited for longer than a request with room may."""
        waiting = [self.send(replica) for _ in range(3)]
        self.now += ROOM * NORMAL_S + 0.125 + self.terms[replica].round_trip_s
        return waiting


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_near_ones_take_all_while_they_have_room(fleet: Fleet) -> None:
    assert {fleet.send().replica for _ in range(100)} == {NEAR}


def test_far_ones_take_what_would_wait_and_near_ones_the_next_that_would_not(fleet: Fleet) -> None:
    waiting = fleet.fill()
    assert fleet.choose() == FAR
    for one in waiting:
        fleet.answer(one)
    assert fleet.choose() == NEAR


def test_the_wait_of_those_before_is_expected_for_the_next(fleet: Fleet) -> None:
    """No request is overdue yet: each of the last waited for as long as the whole objective, with none ahead."""
    for _ in range(4 * MEMORY):
        fleet.answer(fleet.send(NEAR), NORMAL_S)
    assert fleet.choose() == NEAR  # nothing is ahead
    first = fleet.send(NEAR)
    assert fleet.choose() == FAR
    fleet.answer(first)
    assert fleet.choose() == NEAR


def test_a_wait_that_the_replica_reports_counts_at_the_end_of_an_answer(fleet: Fleet) -> None:
    whole = fleet.send(tells_start=False)
    fleet.now += 100.0
    assert fleet.choose() == NEAR, "it may have started long ago"
    whole.waited_s = 0.0
    fleet.answer(whole)
    fleet.send(tells_start=False)
    assert fleet.choose() == NEAR
    late = fleet.send(tells_start=False)
    late.waited_s = 60.0
    fleet.answer(late)
    assert fleet.choose() == FAR
    fleet.answer(fleet.send(FAR, tells_start=False), 100.0)  # which says nothing
    assert fleet.choose() == FAR


@pytest.mark.parametrize(("priority", "limit_s"), QUEUE_LIMITS_S.items())
def test_a_far_one_must_meet_the_objective(fleet: Fleet, priority: Priority, limit_s: float) -> None:
    fleet.fill()
    fleet.send(NEAR, priority=priority)
    fleet.now += ROOM * limit_s + 0.125
    is_low = priority == Priority.LOW
    assert fleet.choose(priority=priority) == (NEAR if is_low else FAR)
    assert fleet.choose(priority=priority, due=fleet.now + ROUND_TRIP_S) == (NEAR if is_low else FAR)
    assert fleet.choose(priority=priority, due=fleet.now + ROUND_TRIP_S - 0.01) == NEAR
    fleet.terms[FAR] = ReplicaTerms(5, limit_s + 0.01)
    assert fleet.choose(priority=priority) == NEAR


@pytest.mark.parametrize("priority", [Priority.CRITICAL, Priority.HIGH, Priority.NORMAL, Priority.LOW])
def test_the_first_token_that_a_request_asks_for_counts_where_a_server_can_meet_it(
    fleet: Fleet, priority: Priority
) -> None:
    def goes_to(ttft_s: float) -> str | None:
        return fleet.choose(priority=priority, first_token_due=fleet.now + ttft_s)

    assert goes_to(ROUND_TRIP_S) == NEAR, "nothing waits there"
    fleet.send(NEAR, priority=Priority.CRITICAL)
    fleet.now += ROOM * ROUND_TRIP_S + 0.015625
    assert fleet.choose(priority=priority) == NEAR
    assert goes_to(ROUND_TRIP_S) == (NEAR if priority == Priority.LOW else FAR)
    assert goes_to(ROUND_TRIP_S - 0.01) == NEAR, "only it is in time"
    fleet.now += ROUND_TRIP_S
    assert goes_to(ROUND_TRIP_S - 0.01) == fleet.choose(priority=priority), "none can meet it: as without it"
    assert fleet.choose((NEAR,), priority=priority, busy_cost=0, first_token_due=fleet.now) == (
        None if priority == Priority.LOW else FAR
    ), "a refusal by a near one is no better than a late answer"


def test_what_near_ones_refuse_goes_on_only_where_the_objective_is_met(fleet: Fleet) -> None:
    def follows(busy_cost: int = 0, **fields: object) -> bool:
        return fleet.choose((NEAR,), busy_cost=busy_cost, **fields) == FAR

    assert follows() and not follows(priority=Priority.LOW)
    assert follows(due=ROUND_TRIP_S) and not follows(due=ROUND_TRIP_S - 0.01)
    fleet.send(FAR)
    fleet.now += NORMAL_S + ROUND_TRIP_S
    assert not follows(), "a far one whose own requests wait that long is no help"
    assert follows(busy_cost=5, priority=Priority.LOW), "one of the same tier"


def test_far_ones_take_everything_when_no_near_one_is_there(fleet: Fleet) -> None:
    fleet.terms[FAR] = ReplicaTerms(5, 100.0)
    for priority in Priority:
        assert fleet.choose((NEAR,), priority=priority, due=0.0) == FAR
    assert fleet.choose((NEAR, FAR)) is None
    fleet.router.leave(NEAR)
    assert fleet.choose(priority=Priority.LOW) == FAR
    fleet.router.join(NEAR)
    assert fleet.choose() == NEAR


def test_without_room_anywhere_the_near_ones_queue_is_taken(fleet: Fleet) -> None:
    fleet.fill(FAR), fleet.fill(NEAR)
    assert fleet.choose() == NEAR


def test_lower_classes_do_not_take_the_room_of_higher_ones(fleet: Fleet) -> None:
    for _ in range(100):
        fleet.send(NEAR, priority=Priority.LOW)
    fleet.now += 1000.0
    assert fleet.choose() == NEAR
    assert fleet.choose(priority=Priority.CRITICAL) == NEAR


def test_a_session_that_overflowed_stays_until_nothing_waits_near(fleet: Fleet) -> None:
    waiting = fleet.fill()
    session = fleet.send(session="chat")
    assert session.replica == FAR
    fleet.answer(session)
    for one in waiting:
        fleet.answer(one)
    running = fleet.send(NEAR)
    fleet.now += 0.01
    assert (fleet.choose(), fleet.choose(session="chat")) == (NEAR, FAR)
    fleet.answer(running)
    assert fleet.choose(session="chat") == NEAR


def test_a_near_session_stays_as_long_as_its_objective_is_met(fleet: Fleet) -> None:
    fleet.answer(fleet.send(session="chat"))
    fleet.fill()
    assert (fleet.choose(), fleet.choose(session="chat")) == (FAR, NEAR)
    fleet.now += NORMAL_S
    assert fleet.choose(session="chat") == FAR


def test_a_prompt_that_is_mostly_in_a_cache_counts_as_a_session(fleet: Fleet) -> None:
    chat = {"num_tokens": 40, "chunks": (1, 2, 3), "chunk_tokens": 10}
    fleet.answer(fleet.send(FAR, **chat))
    waiting = fleet.send(NEAR)
    fleet.now += 0.01
    assert fleet.choose(**chat) == FAR
    assert fleet.choose(**chat | {"num_tokens": 61}) == NEAR, "less than half of it is cached"
    fleet.answer(fleet.send(NEAR, **chat))
    assert fleet.choose(**chat) == NEAR
    fleet.answer(waiting)


def test_refused_requests_say_nothing_of_waits(fleet: Fleet) -> None:
    refused = fleet.send(NEAR)
    fleet.now += 100.0
    fleet.router.ended(refused)
    fleet.send(NEAR)
    assert fleet.choose() == NEAR


def test_tiers_of_several_replicas() -> None:
    fleet = Fleet(a=ReplicaTerms(1), b=ReplicaTerms(1), c=ReplicaTerms(2), d=ReplicaTerms(3))
    assert {fleet.send().replica for _ in range(8)} == {"a", "b"}
    fleet.now += NORMAL_S
    assert fleet.send().replica == "c"
    assert fleet.choose(excluded=("c",)) == "d"
    assert fleet.choose(excluded=("a", "b", "c")) == "d"


TERMS = {"a": ReplicaTerms(0), "b": ReplicaTerms(0), "c": ReplicaTerms(1, 0.5), "d": ReplicaTerms(4, 1.5)}


class TierMachine(RuleBasedStateMachine):
    """Random loads, beside a router of one tier, and the rules in plain words."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.router = TieredRouter[str](TERMS.__getitem__, lambda: self.now)
        self.flat = TieredRouter[str](lambda _: ReplicaTerms(0), lambda: self.now)
        self.plain = PrefixAwareRouter[str]()
        self.open: list[tuple[RoutedRequest[str], RoutedRequest[str], RoutedRequest[str]]] = []

    @property
    def routers(self) -> tuple[PrefixAwareRouter[str], ...]:
        return self.router, self.flat, self.plain

    @rule(name=st.sampled_from("abcd"))
    def join(self, name: str) -> None:
        for router in self.routers:
            router.join(name)

    @rule(name=st.sampled_from("abcd"))
    def leave(self, name: str) -> None:
        for router in self.routers:
            router.leave(name)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.5, 2.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        session=st.sampled_from(["", "", "x", "y", "z"]),
        priority=st.sampled_from(Priority),
        length=st.integers(0, 3),
        left_s=st.sampled_from([0.1, 1.0, math.inf]),
        tells_start=st.booleans(),
        excluded=st.sets(st.sampled_from("abcd"), max_size=2),
    )
    def send(
        self, session: str, priority: Priority, length: int, left_s: float, tells_start: bool, excluded: set[str]
    ) -> None:
        request = RouteRequest(
            session, priority, 10 * length + 5, tuple(range(length)), 10, self.now + left_s, tells_start
        )
        chosen = self.router.choose(request, excluded)
        assert chosen == self.router.choose(request, excluded), "a decision changes nothing"
        present = set(self.router.slots) - excluded
        assert self.flat.choose(request, excluded) == self.plain.choose(request, excluded), "one tier is none"
        if chosen is None:
            assert not present
            return
        assert chosen in present
        self.check_tier(request, chosen, present)
        routed = [router.chosen(request, chosen) for router in self.routers]
        self.open.append((routed[0], routed[1], routed[2]))

    def check_tier(self, request: RouteRequest, chosen: str, present: set[str]) -> None:
        cost, least = TERMS[chosen].cost, min(TERMS[name].cost for name in present)
        if cost == least:
            return
        assert request.priority != Priority.LOW
        objective_s = min(QUEUE_LIMITS_S[request.priority], request.due - self.now)
        tier = [name for name in present if TERMS[name].cost == cost]
        assert min(TERMS[name].round_trip_s for name in tier) <= objective_s
        nearer = [name for name in present if TERMS[name].cost < cost]
        assert all(self.num_unstarted(name, request.priority) for name in nearer), "an idle server is cheaper"

    def num_unstarted(self, name: str, priority: Priority) -> int:
        return sum(
            not one.has_started and one.request.priority <= priority and self.router.slot_of(one) is not None
            for one, *_ in self.open
            if one.replica == name
        )

    @precondition(lambda self: self.open)
    @rule(data=st.data(), waited_s=st.sampled_from([None, 0.0, 0.2, 5.0]))
    def start(self, data: st.DataObject, waited_s: float | None) -> None:
        which = data.draw(st.sampled_from(self.open))
        for router, one in zip(self.routers, which, strict=True):
            one.waited_s = waited_s
            router.started(one)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        which = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        for router, one in zip(self.routers, which, strict=True):
            router.ended(one)

    @invariant()
    def queues_are_what_has_not_started(self) -> None:
        for name, slot in self.router.slots.items():
            for priority in Priority:
                assert len(self.router._ahead(priority, slot)) == self.num_unstarted(name, priority)
        assert self.router._unstarted.keys() == set(self.router.slots.values())


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
