"""Sessions, forks and the host tier through KVCacheManager: plain examples."""

from __future__ import annotations

import pytest

from support.kvcache.invariants import check_cache
from support.kvcache.kv_machine import kv_request
from tidewheel.errors import NotFound
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.kvcache.prefix import NO_HIT
from tidewheel.kvcache.sessions import SessionLimits
from tidewheel.request import Request
from tidewheel.tenants import TenantLimits

BLOCK_SIZE = 4


def make_manager(num_blocks: int = 8, num_host_blocks: int = 0, **limits: object) -> KVCacheManager:
    return KVCacheManager(
        num_blocks,
        BLOCK_SIZE,
        enable_prefix_caching=True,
        num_host_blocks=num_host_blocks,
        session_limits=SessionLimits(**limits),
    )


class Turns:
    """Runs requests one after the other, each in row 0, each from its entry to its end."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.step_id = 0
        self.now = 0.0

    def run(self, request: Request, row: int = 0) -> int:
        """Tokens that were there already."""
        num_tokens = self.enter(request, row)
        self.end(request, row)
        return num_tokens

    def enter(self, request: Request, row: int = 0) -> int:
        hit = self.kv.prefixes.find(request)
        assert self.kv.allocate(row, request.num_tokens, hit)
        self.step()
        return hit.num_tokens

    def step(self) -> None:
        self.kv.take_transfers(self.step_id)
        self.kv.transfers.done(self.step_id)
        self.step_id += 1

    def end(self, request: Request, row: int = 0) -> None:
        self.kv.commit(row, request, request.num_tokens)
        self.kv.keep_session(row, request, request.num_tokens, self.now)
        self.kv.free(row)
        check_cache(self.kv)


def turn(num_tokens: int, session_id: str = "s", **fields: object) -> Request:
    return kv_request(f"{session_id}-{num_tokens}", num_tokens, session_id=session_id, **fields)


def test_the_next_turn_pays_for_its_new_tokens_alone() -> None:
    turns = Turns(make_manager())
    assert turns.run(turn(10)) == 0
    assert turns.kv.update_stats().num_session_blocks == 3
    assert turns.run(turn(15)) == 10  # two whole blocks, and two tokens of the third
    assert turns.run(turn(21)) == 15
    stats = turns.kv.stats
    assert (stats.num_hit_queries, stats.num_device_hits) == (46, 25)
    assert stats.num_host_hits == 0


def test_one_token_is_left_to_compute_when_a_turn_adds_none() -> None:
    turns = Turns(make_manager())
    turns.run(turn(10))
    assert turns.run(turn(10)) == 9


def test_a_turn_that_was_edited_pays_from_the_edit_on() -> None:
    turns = Turns(make_manager())
    turns.run(turn(11))
    edited = kv_request("b", [*range(9), 77, 78, 79], session_id="s")
    assert turns.enter(edited) == 9


def test_session_blocks_count_as_free_and_give_way_oldest_first() -> None:
    turns = Turns(make_manager(6))
    turns.run(turn(6, "old"))
    turns.run(kv_request("n", [9] * 6, session_id="new"))
    kv = turns.kv
    assert (kv.num_free_blocks, kv.update_stats().num_session_blocks) == (6, 4)
    assert kv.allocate(1, 4 * BLOCK_SIZE)  # two are free, two must come from a session
    stats = kv.update_stats()
    assert (stats.num_sessions, stats.num_session_blocks) == (1, 2)
    kv.free(1)
    with pytest.raises(NotFound, match="'old'"):
        kv.sessions.close("", "old")
    kv.sessions.close("", "new")


def test_ordinary_cached_blocks_give_way_before_sessions() -> None:
    turns = Turns(make_manager(6))
    turns.run(turn(8))
    turns.run(kv_request("plain", [5] * 16))
    assert turns.kv.allocate(1, 4 * BLOCK_SIZE)
    assert turns.kv.update_stats().num_session_blocks == 2


def test_a_session_goes_to_the_host_tier_and_comes_back_with_its_tail() -> None:
    turns = Turns(make_manager(4, num_host_blocks=8))
    turns.run(turn(10))
    kv = turns.kv
    assert kv.allocate(1, 4 * BLOCK_SIZE)
    moved = kv.take_transfers(100)
    assert len(moved.swap_out_blocks) == len(moved.swap_out_slots) == 3
    kv.transfers.done(100)
    kv.free(1)
    stats = kv.update_stats()
    assert (stats.num_sessions, stats.num_session_blocks, kv.sessions.num_blocks("")) == (1, 0, 0)
    assert turns.enter(turn(13)) == 10
    assert (stats.num_swapped_out, stats.num_swapped_in) == (3, 3)
    assert stats.num_host_hits == 10


def test_a_session_that_has_no_room_to_be_copied_gives_its_tail_to_the_row() -> None:
    turns = Turns(make_manager(4))
    turns.run(turn(10))
    longest = turn(16)
    hit = turns.kv.prefixes.find(longest)
    assert hit.num_tokens == 10
    turns.kv.allocate(1, 4)  # the last block that is free
    assert turns.kv.allocate(0, 12, hit)
    assert turns.kv.block_table(0)[2] == hit.tail_block
    assert len(turns.kv.take_transfers(7).copy_sources) == 0
    assert turns.kv.sessions.num_blocks("") == 2
    check_cache(turns.kv)


def test_two_requests_use_one_session_at_once_and_it_keeps_the_one_that_ended_last() -> None:
    turns = Turns(make_manager(16))
    turns.run(turn(10))
    base = list(range(10))
    one = kv_request("one", [*base, 50, 51, 52], session_id="s")
    two = kv_request("two", [*base, 60, 61, 62, 63, 64], session_id="s")
    assert turns.enter(one, 0) == 10
    assert turns.enter(two, 1) == 10  # both share its blocks, and each has a copy of its tail
    assert turns.kv.block_table(0)[:2] == turns.kv.block_table(1)[:2]
    assert turns.kv.block_table(0)[2] != turns.kv.block_table(1)[2]
    turns.end(two, 1)
    turns.end(one, 0)
    assert turns.kv.update_stats().num_sessions == 1
    follow_up = kv_request("f", [*one.prompt_token_ids.tolist(), 7], session_id="s")
    assert turns.enter(follow_up) == 13
    other_branch = kv_request("o", [*two.prompt_token_ids.tolist(), 7], session_id="s")
    assert turns.kv.prefixes.find(other_branch).num_tokens == 12  # whole blocks, as long as they stay


def test_sessions_of_tenants_and_salts_are_their_own() -> None:
    turns = Turns(make_manager(16))
    turns.run(turn(3, tenant="a"))
    assert turns.kv.prefixes.find(turn(4, tenant="a")).num_tokens == 3
    assert turns.kv.prefixes.find(turn(4, tenant="b")) == NO_HIT
    assert turns.kv.prefixes.find(turn(4, tenant="a", salt="x")) == NO_HIT
    with pytest.raises(NotFound):
        turns.kv.sessions.close("b", "s")


def test_sessions_end_when_their_time_is_over() -> None:
    turns = Turns(make_manager())
    turns.run(turn(5, session_ttl=10.0))
    turns.kv.sessions.expire(9.9)
    assert turns.kv.update_stats().num_sessions == 1
    turns.kv.sessions.expire(10.0)
    stats = turns.kv.update_stats()
    assert (stats.num_sessions, stats.num_session_blocks) == (0, 0)
    turns.run(turn(5))
    turns.run(turn(6, session_ttl=0.0))  # its last turn
    assert turns.kv.update_stats().num_sessions == 0


def test_quotas_cut_one_session_and_drop_others() -> None:
    turns = Turns(make_manager(16, max_session_blocks=2, tenants={"t": TenantLimits(max_blocks=3)}, max_sessions=3))
    turns.run(turn(14))
    assert turns.kv.sessions.num_blocks("") == 2
    turns.run(kv_request("a", [1] * 8, tenant="t", session_id="one"))
    turns.run(kv_request("b", [2] * 8, tenant="t", session_id="two"))
    assert turns.kv.sessions.num_blocks("t") == 2
    for number in range(3):
        turns.run(kv_request(f"c{number}", [number + 5], session_id=f"more{number}"))
    assert turns.kv.update_stats().num_sessions == 3
    with pytest.raises(NotFound):
        turns.kv.sessions.close("", "s")


def test_what_is_not_to_be_trusted_is_no_session() -> None:
    turns = Turns(make_manager())
    turns.run(turn(10))
    wrong = turn(15)
    turns.enter(wrong)
    turns.kv.forget(0)
    turns.kv.free(0)
    assert turns.kv.prefixes.find(turn(16)).num_tokens == 0
    turns.kv.sessions.close("", "s")
    check_cache(turns.kv)


def test_a_preempted_request_finds_its_blocks_in_the_host_tier() -> None:
    turns = Turns(make_manager(4, num_host_blocks=4))
    victim = kv_request("v", 11)
    turns.enter(victim)
    assert turns.kv.offload(0, victim, 11) == 2
    turns.kv.free(0)
    assert turns.kv.allocate(1, 16)
    turns.step()
    turns.kv.free(1)
    assert turns.enter(victim) == 8
    assert turns.kv.stats.num_swapped_in == 2
    turns.kv.commit(0, victim, 11)
    assert turns.kv.offload(0, victim, 11) == 2  # they are there already
    assert len(turns.kv.take_transfers(50).swap_out_blocks) == 0


def test_the_host_tier_takes_the_head_when_not_all_fits() -> None:
    turns = Turns(make_manager(8, num_host_blocks=1))
    victim = kv_request("v", 12)
    turns.enter(victim)
    assert turns.kv.offload(0, victim, 12) == 1
    assert make_manager().stats.num_host_blocks == 0


def test_a_hit_that_the_host_tier_has_lost_is_refused() -> None:
    turns = Turns(make_manager(4, num_host_blocks=1))
    victim, other = kv_request("v", 5), kv_request("o", [9] * 5)
    for request in (victim, other):
        turns.enter(request)
        hit_before = turns.kv.prefixes.find(victim)
        turns.kv.offload(0, request, 5)
        turns.kv.free(0)
        assert turns.kv.allocate(1, 16)
        turns.step()
        turns.kv.free(1)
    assert hit_before.host_keys and turns.kv.prefixes.find(victim) == NO_HIT
    assert not turns.kv.allocate(0, 5, hit_before)
    check_cache(turns.kv)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_fork_shares_whole_blocks_and_copies_the_rest(enable_prefix_caching: bool) -> None:
    kv = KVCacheManager(8, BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching)
    leader, child = kv_request("l", 11), kv_request("c", 11)
    assert kv.allocate(0, 11)
    kv.commit(0, leader, 11)
    hit = kv.fork_hit(0, child)
    assert (hit.block_ids, hit.num_tokens, hit.tail_block) == (kv.block_table(0)[:2], 10, kv.block_table(0)[2])
    assert kv.allocate(1, 11, hit)
    moved = kv.take_transfers(0)
    assert (moved.copy_sources.tolist(), moved.copy_targets.tolist()) == ([hit.tail_block], [kv.block_table(1)[2]])
    check_cache(kv)
    kv.free(0)
    assert kv.num_free_blocks == 8 - 4  # the source is held until it is copied
    kv.transfers.done(0)
    assert kv.num_free_blocks == 8 - 3


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    kv = make_manager()
    kv.allocate(0, 9)
    hit = kv.fork_hit(0, kv_request("c", 9))
    assert (len(hit.block_ids), hit.num_tokens, hit.tail_block) == (2, 8, -1)


def test_there_is_no_fork_of_a_row_whose_content_has_yet_to_arrive() -> None:
    turns = Turns(make_manager())
    turns.run(turn(10))
    leader = turn(11)
    turns.kv.allocate(0, 11, turns.kv.prefixes.find(leader))
    assert turns.kv.fork_hit(0, kv_request("c", 11)) == NO_HIT
    turns.step()
    assert turns.kv.fork_hit(0, kv_request("c", 11)).num_tokens == 10


def test_after_a_failure_nothing_of_the_step_is_found() -> None:
    turns = Turns(make_manager(8, num_host_blocks=4))
    request = kv_request("v", 9)
    turns.enter(request)
    turns.kv.offload(0, request, 9)
    turns.kv.take_transfers(1)
    turns.kv.free(0, after_step=1)
    turns.kv.transfers.abandon()
    assert turns.kv.prefixes.find(kv_request("again", 9)) == NO_HIT
    assert (turns.kv.num_free_blocks, turns.kv.update_stats().num_free_host_blocks) == (8, 4)
    check_cache(turns.kv)
