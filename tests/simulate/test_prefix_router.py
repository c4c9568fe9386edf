"""The router that knows sessions and caches: homes, bounds, classes, and what replicas report of their caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.fleet import routers
from tidewheel.fleet.router import RoutedRequest, RouteRequest, chunk_hashes, load_bound
from tidewheel.fleet.routers import PrefixAwareRouter, PrefixIndex
from tidewheel.request import Priority

CHUNK = 100


def router_of(num_replicas: int) -> PrefixAwareRouter[int]:
    router = PrefixAwareRouter[int]()
    for replica in range(num_replicas):
        router.join(replica)
    return router


def prompt(*chunks: int, **others: object) -> RouteRequest:
    return RouteRequest(num_tokens=CHUNK * len(chunks) + 1, chunks=chunks, chunk_tokens=CHUNK, **others)  # type: ignore[arg-type]


def send(router: PrefixAwareRouter[int], request: RouteRequest) -> RoutedRequest[int]:
    replica = router.choose(request)
    assert replica is not None
    return router.chosen(request, replica)


def serve(router: PrefixAwareRouter[int], request: RouteRequest, cached: int | None = None) -> int:
    routed = send(router, request)
    router.started(routed)
    router.ended(routed, cached)
    return routed.replica


def test_a_prompt_goes_where_the_most_of_it_is_cached() -> None:
    router = router_of(4)
    router.ended(router.chosen(prompt(1, 2), 1))  # never started: knows nothing
    for replica, chunks in ((2, (1, 2)), (3, (1, 2, 3)), (0, (9,))):
        routed = router.chosen(prompt(*chunks), replica)
        router.started(routed)
        router.ended(routed)
    assert router.choose(prompt(1, 2, 3, 4)) == 3
    assert router.choose(prompt(1, 2, 7)) == 2  # both have two chunks
    assert router.choose(prompt(9, 2)) == 0


def test_a_cached_prefix_is_left_where_others_wait_for_longer() -> None:
    router = router_of(2)
    serve(router, prompt(1, 2))  # on 0
    router.chosen(prompt(*range(10, 15)), 0)
    assert router.choose(prompt(1, 2)) == 1
    router.chosen(prompt(*range(20, 30)), 1)
    assert router.choose(prompt(1, 2)) == 0


def test_a_session_stays_at_home_until_its_replica_leaves() -> None:
    router = router_of(8)
    homes = {name: serve(router, RouteRequest(session=name)) for name in map(str, range(200))}
    router.join(8)
    assert {name: serve(router, RouteRequest(session=name)) for name in homes} == homes
    router.leave(3)
    later = {name: serve(router, RouteRequest(session=name)) for name in homes}
    assert {name for name in homes if later[name] != homes[name]} == {n for n, home in homes.items() if home == 3}
    router.join(3)  # cold: those that went elsewhere stay with their new cache
    assert {name: serve(router, RouteRequest(session=name)) for name in homes} == later
    assert min(Counter(homes.values()).values()) > 5


def test_two_routers_that_share_nothing_agree_on_new_sessions() -> None:
    one, other = router_of(8), router_of(8)
    names = [str(number) for number in range(300)]
    homes = {name: serve(one, RouteRequest(session=name)) for name in names}
    assert homes == {name: serve(other, RouteRequest(session=name)) for name in reversed(names)}
    one.leave(2)
    other.leave(2)
    other.join(9)
    fresh = [f"new {number}" for number in range(300)]
    moved = sum(serve(one, RouteRequest(session=n)) != serve(other, RouteRequest(session=n)) for n in fresh)
    assert 0 < moved < 2 * len(fresh) / 8


def test_a_full_home_overflows_and_the_session_moves_there() -> None:
    router = router_of(2)
    home = serve(router, RouteRequest(session="s"))
    busy = [router.chosen(prompt(), home) for _ in range(6)]
    away = send(router, RouteRequest(session="s"))
    assert away.replica == 1 - home
    for routed in (*busy, away):
        router.ended(routed)
    assert serve(router, RouteRequest(session="s")) == 1 - home


def test_requests_that_end_at_once_move_no_session() -> None:
    router = router_of(4)
    home = serve(router, RouteRequest(session="s"))
    routed_requests = [router.chosen(prompt(), replica) for _ in range(16) for replica in range(4)]
    for routed in routed_requests[:]:  # as many come as go
        router.ended(routed)
        routed_requests.append(router.chosen(prompt(), routed.replica))
    ending = [routed for routed in routed_requests[64:] if routed.replica != home]
    for routed in ending[:30]:
        router.ended(routed)
    assert router.num_open[router.slots[home]] == 16 > load_bound(router.total_open, 4)
    assert router.choose(RouteRequest(session="s")) == home
    for _ in range(100):
        serve(router, prompt())
    assert router.choose(RouteRequest(session="s")) != home  # so little has become usual


def test_a_critical_request_goes_where_it_starts_first() -> None:
    router, critical = router_of(3), Priority.CRITICAL
    home = serve(router, prompt(1, 2, 3, session="s"))
    others = [replica for replica in range(3) if replica != home]
    assert router.choose(prompt(1, 2, 3, session="s", priority=critical)) == home  # cached and idle
    queued = [router.chosen(prompt(*range(9), priority=critical), replica) for replica in (home, others[0])]
    assert router.choose(prompt(1, 2, 3, session="s", priority=critical)) == others[1]
    for routed in queued:
        router.ended(routed)
    for _ in range(5):
        router.chosen(prompt(*range(9), priority=Priority.LOW), home)  # it does not wait for those
    assert router.choose(prompt(1, 2, 3, session="s", priority=critical)) == home
    assert router.choose(prompt(1, 2, 3, session="s")) != home  # others do not pass the bound


def test_a_class_waits_only_for_itself_and_those_above() -> None:
    router = router_of(2)
    router.chosen(prompt(1, priority=Priority.HIGH), 0)
    router.chosen(prompt(2, 3, 4, priority=Priority.LOW), 1)
    assert router.choose(prompt(priority=Priority.HIGH)) == 1
    assert router.choose(prompt(priority=Priority.LOW)) == 0


def test_a_replica_that_found_less_is_believed() -> None:
    """What was used before the chunk that it lost is lost too; what was used since is not."""
    router = router_of(2)
    for chunks in ((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)):
        routed = router.chosen(prompt(*chunks), 0)
        router.started(routed)
        router.ended(routed)
    assert len(router.prefixes) == 12
    routed = router.chosen(prompt(5, 6, 7, 8), 0)
    router.started(routed)
    router.ended(routed, 0)
    slot = router.slots[0]
    known = [len(router.prefixes.known(slot, chunks)) for chunks in ((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12))]
    assert known == [0, 4, 4]


def test_what_was_used_together_is_lost_together() -> None:
    router = router_of(1)
    serve(router, prompt(5, 6, 7, 8))
    serve(router, prompt(5, 6), cached=0)
    assert len(router.prefixes.known(0, (5, 6, 7, 8))) == 2  # those that were computed again


@pytest.mark.parametrize("cached", [None, 300, 400, 1000])
def test_nearly_all_that_was_expected_is_no_sign_of_a_loss(cached: int | None) -> None:
    router = router_of(1)
    serve(router, prompt(1))
    serve(router, prompt(5, 6, 7, 8))
    serve(router, prompt(5, 6, 7, 8), cached)
    assert len(router.prefixes.known(0, (1,))) == 1


def test_chunks_that_are_being_computed_are_no_loss() -> None:
    router = router_of(1)
    serve(router, prompt(1))
    first = router.chosen(prompt(5, 6, 7, 8), 0)
    second = router.chosen(prompt(5, 6, 7, 8), 0)
    router.started(second, 0)
    assert len(router.prefixes.known(0, (1,))) == 1
    router.started(first, 0)


def test_a_request_that_never_started_cached_nothing() -> None:
    router = router_of(2)
    router.ended(router.chosen(prompt(1, 2, 3), 0))
    assert len(router.prefixes) == 0


def depths_of(knowledge: PrefixIndex, chunks: Sequence[int], num_slots: int) -> list[int]:
    depths = knowledge.depths(chunks, num_slots)
    return [0] * num_slots if depths is None else depths.astype(int).tolist()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(0, 6)), max_size=60))
def test_depths_are_those_of_each_replica(touches: list[tuple[int, int, int]]) -> None:
    """Against one set for each replica, with more replicas than bits in a byte."""
    knowledge, sets = PrefixIndex(), [set[int]() for _ in range(10)]
    for slot in range(10):
        knowledge.join(slot)
    for slot, family, length in touches:
        chunks = [10 * family + depth for depth in range(length)]
        knowledge.touch(slot, chunks)
        sets[slot].update(chunks)
    for family in range(3):
        chunks = [10 * family + depth for depth in range(7)]
        expected = [next((d for d, chunk in enumerate(chunks) if chunk not in own), len(chunks)) for own in sets]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(routers, "_MAX_STAIRS", 10)
            assert depths_of(knowledge, chunks, 10) == expected


def test_of_many_depths_the_largest_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "_MAX_STAIRS", 2)
    knowledge = PrefixIndex()
    for slot in range(4):
        knowledge.join(slot)
        knowledge.touch(slot, range(slot + 1))
    assert depths_of(knowledge, range(9), 4) == [0, 0, 3, 4]


def test_the_beginning_of_prompts_is_forgotten_last() -> None:
    knowledge = PrefixIndex(max_known=6)
    knowledge.join(0)
    knowledge.touch(0, [1, 2, 3])
    knowledge.touch(0, [1, 7, 8])
    knowledge.touch(0, [5, 6])
    assert knowledge.known(0, [1, 2, 3]) == (2, 1)  # 3 went first
    knowledge.join(1)
    assert len(knowledge) == 3  # each has half the room now


def test_hashes_are_chained() -> None:
    one, other = chunk_hashes(b"aabbcc", 2), chunk_hashes(b"xxbbcc", 2)
    assert len(one) == 3 and not set(one) & set(other)
    assert chunk_hashes(b"aabbc", 2) == one[:2]
    assert chunk_hashes(b"", 2) == chunk_hashes(b"a", 2) == ()
    assert chunk_hashes(memoryview(b"aabbcc"), 2) == one
