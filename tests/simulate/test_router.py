"""Where requests go."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.errors import ConfigError
from tidewheel.fleet.router import HashRing, RouteKey, load_bound, make_router

NOTHING = RouteKey()


def test_round_robin_takes_turns() -> None:
    router = make_router("round-robin", 3)
    assert [router.choose(NOTHING, [9, 0, 0]) for _ in range(5)] == [0, 1, 2, 0, 1]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_least_loaded_takes_a_minimum(loads: list[int]) -> None:
    chosen = make_router("least-loaded", len(loads)).choose(NOTHING, loads)
    assert loads[chosen] == min(loads)


@given(st.text(min_size=1, max_size=8), st.lists(st.integers(0, 50), min_size=5, max_size=5))
def test_a_session_stays_where_it_is_whatever_the_load(session: str, loads: list[int]) -> None:
    router = make_router("session-affinity", 5)
    assert router.choose(RouteKey(session=session), loads) == router.choose(RouteKey(session=session), [0] * 5)


@given(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=300), st.integers(1, 12))
def test_bounded_load_is_bounded_after_every_request(keys: list[str], num_replicas: int) -> None:
    """The paper's bound holds at every arrival, however skewed the keys are."""
    router = make_router("prefix-aware", num_replicas)
    loads = [0] * num_replicas
    for key in keys:
        bound = load_bound(loads)
        chosen = router.choose(RouteKey(prefix=key), loads)
        loads[chosen] += 1
        assert loads[chosen] <= bound


def test_one_prefix_stays_on_one_replica_while_that_has_room() -> None:
    router = make_router("prefix-aware", 4)
    chosen = {router.choose(RouteKey(prefix="system prompt"), [5, 5, 5, 5]) for _ in range(10)}
    assert len(chosen) == 1


def test_an_overflow_goes_to_one_neighbour_not_everywhere() -> None:
    router = make_router("prefix-aware", 8)
    loads = [10] * 8
    owner = router.choose(RouteKey(prefix="p"), loads)
    loads[owner] = 40
    assert len({router.choose(RouteKey(prefix="p"), loads) for _ in range(5)}) == 1


def test_requests_without_a_key_go_to_the_least_loaded() -> None:
    for name in ("session-affinity", "prefix-aware"):
        assert make_router(name, 3).choose(NOTHING, [4, 2, 3]) == 1


def test_the_ring_spreads_keys_and_moves_few_when_a_replica_comes() -> None:
    before, after = HashRing(range(10)), HashRing(range(11))
    keys = [f"key {number}" for number in range(5000)]
    shares = Counter(before.owner(key) for key in keys)
    assert min(shares.values()) > 250 and max(shares.values()) < 900  # 500 each on average
    moved = [key for key in keys if before.owner(key) != after.owner(key)]
    assert len(moved) < 2 * len(keys) / 11
    assert all(after.owner(key) == 10 for key in moved)


def test_an_unknown_router_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="router is 'random': choose one of round-robin, least-loaded"):
        make_router("random", 2)
