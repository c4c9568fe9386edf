"""Where requests go."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.errors import ConfigError
from tidewheel.fleet.router import RoutedRequest, Router, RouteRequest, load_bound
from tidewheel.fleet.routers import ROUTERS, HashRing
from tidewheel.simulate.fleet_choice import check_router

NOTHING = RouteRequest(num_tokens=10)


def fleet(name: str, num_replicas: int, open_requests: dict[int, int] | None = None) -> Router[int]:
    """Return a router with replicas 0, 1, …, and so many open requests on some."""
    router: Router[int] = ROUTERS[name]()
    for replica in range(num_replicas):
        router.join(replica)
    for replica, count in (open_requests or {}).items():
        for _ in range(count):
            router.chosen(NOTHING, replica)
    return router


def send(router: Router[int], request: RouteRequest = NOTHING) -> RoutedRequest[int]:
    replica = router.choose(request)
    assert replica is not None
    return router.chosen(request, replica)


@pytest.mark.parametrize("name", ROUTERS)
def test_only_replicas_that_are_there_are_chosen(name: str) -> None:
    router = fleet(name, 3)
    assert {send(router, RouteRequest(session=f"s{n}")).replica for n in range(30)} == {0, 1, 2}
    router.leave(1)
    router.leave(1)
    assert {send(router, RouteRequest(session=f"s{n}")).replica for n in range(30)} == {0, 2}
    assert router.choose(NOTHING, excluded=[0]) == 2
    assert router.choose(RouteRequest(session="s1"), excluded=[2]) == 0
    assert router.choose(NOTHING, excluded=[0, 2]) is None
    router.leave(0)
    router.leave(2)
    assert router.choose(NOTHING) is None
    router.join(1)
    assert router.choose(NOTHING) == 1


@pytest.mark.parametrize("name", ROUTERS)
def test_a_flight_that_ends_after_its_replica_left_and_came_back_counts_nothing(name: str) -> None:
    router = fleet(name, 1)
    routed_requests = [send(router) for _ in range(3)]
    router.started(routed_requests[0], 0)
    router.leave(0)
    router.join(0)
    for routed in routed_requests:
        router.started(routed, 0)
        router.ended(routed)
    assert router.num_open[router.slots[0]] == 0 and router.total_open == 0
    assert not router.running.any() and not router.total_waiting.any()


def test_round_robin_takes_turns() -> None:
    router = fleet("round-robin", 3)
    assert [send(router).replica for _ in range(5)] == [0, 1, 2, 0, 1]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20))
def test_least_loaded_takes_a_minimum(loads: list[int]) -> None:
    router = fleet("least-loaded", len(loads), dict(enumerate(loads)))
    assert loads[send(router).replica] == min(loads)


@given(st.text(min_size=1, max_size=8), st.lists(st.integers(0, 20), min_size=5, max_size=5))
def test_a_session_stays_where_it_is_whatever_the_load(session: str, loads: list[int]) -> None:
    busy, idle = fleet("session-affinity", 5, dict(enumerate(loads))), fleet("session-affinity", 5)
    assert busy.choose(RouteRequest(session=session)) == idle.choose(RouteRequest(session=session))


@given(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=300), st.integers(1, 12))
def test_bounded_load_is_bounded_after_every_request(sessions: list[str], num_replicas: int) -> None:
    """The paper's bound holds at every arrival, however skewed the keys are."""
    router, loads = fleet("prefix-aware", num_replicas), [0] * num_replicas
    for session in sessions:
        bound = load_bound(sum(loads), num_replicas)
        chosen = send(router, RouteRequest(session=session)).replica
        loads[chosen] += 1
        assert loads[chosen] <= bound


def ring_of(num_replicas: int) -> HashRing:
    ring = HashRing()
    for slot in range(num_replicas):
        ring.join(f"replica {slot}", slot)
    return ring


def owner(ring: HashRing, key: str, *full: int) -> int | None:
    return ring.first(key, lambda slots: ~np.isin(slots, full))


def test_the_ring_spreads_keys_and_moves_few_when_a_replica_comes() -> None:
    before, after = ring_of(10), ring_of(11)
    keys = [f"key {number}" for number in range(5000)]
    shares = Counter(owner(before, key) for key in keys)
    assert min(shares.values()) > 250 and max(shares.values()) < 900  # 500 each on average
    moved = [key for key in keys if owner(before, key) != owner(after, key)]
    assert len(moved) < 2 * len(keys) / 11
    assert all(owner(after, key) == 10 for key in moved)
    after.leave(10)
    assert [owner(after, key) for key in keys] == [owner(before, key) for key in keys]


def test_the_ring_goes_round_past_full_replicas() -> None:
    """A full replica is as one that left, on a ring of more points than a first look sees."""
    ring, without = ring_of(10), ring_of(10)
    keys = [f"key {number}" for number in range(300)]
    for slot in (4, 7):
        without.leave(slot)
    assert [owner(ring, key, 4, 7) for key in keys] == [owner(without, key) for key in keys]
    assert {owner(ring, key, *range(9)) for key in keys} == {9}
    assert owner(ring, "key", *range(10)) is None
    assert owner(HashRing(), "key") is None


def test_an_unknown_router_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="router is 'random': choose one of round-robin, least-loaded"):
        check_router("random")
