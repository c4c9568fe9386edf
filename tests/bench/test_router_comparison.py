"""Figures of `benchmarks/routing/router_comparison.py`, where it is known what each turn finds."""

from __future__ import annotations

import pytest

from routing.changing_fleet import Change
from routing.peer_routers import CacheAware, LeastBlocks, PowerOfTwo, PrefixCacheAffinity
from routing.router_comparison import make_fleet, means, turns
from tidewheel.fleet.router import Router, RouteRequest
from tidewheel.fleet.routers import RoundRobinRouter
from tidewheel.workload.traces import Trace


def test_a_turn_whose_cache_left_is_told_from_one_that_missed_it() -> None:
    """Of two replicas the first leaves at 30 s, and another joins at 60 s. They take requests in turn."""
    trace = Trace.of(
        arrivals=(10.0, 11.0, 40.0, 41.0, 70.0, 71.0),
        prompt_tokens=(300, 300, 700, 700, 1100, 1100),
        output_tokens=(20,) * 6,
        sessions=(0, 1) * 3,
        session_names=("a", "b"),
    )
    fleet = make_fleet(RoundRobinRouter(), trace, 2, [Change(30.0, joins=False), Change(60.0, joins=True)])
    found = turns(fleet, fleet.run(), trace.arrivals > 30)
    assert found["turns_cache_lost"] == 1 / 4  # the second of a, whose replica has left
    assert found["turns_at_home"] == 2 / 4  # both of b
    assert found["turns_at_cache"] == pytest.approx(2 / 3)  # the third of a goes to the new replica


def test_means_are_over_the_seeds() -> None:
    runs = [
        {"trace": "mixed", "router": "r", "seed": seed, "cached": cached, "turns_at_home": None}
        for seed, cached in ((1, 0.5), (2, 1.0))
    ]
    assert means(runs) == {"trace": "mixed", "router": "r", "cached": 0.75, "turns_at_home": None}


@pytest.mark.parametrize("make", [PowerOfTwo, CacheAware, PrefixCacheAffinity, LeastBlocks])
def test_peers_choose_by_load_where_no_replica_knows_the_prompt(make: type[Router[int]]) -> None:
    router = make()
    for replica in range(2):
        router.join(replica)
    request = RouteRequest(num_tokens=64, chunks=(1, 2), chunk_tokens=32)
    router.chosen(request, 0)
    assert router.choose(RouteRequest(num_tokens=64, chunks=(3, 4), chunk_tokens=32)) == 1
