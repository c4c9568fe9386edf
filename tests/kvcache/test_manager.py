"""KVCacheManager: plain examples."""

from __future__ import annotations

import pytest

from support.kvcache.invariants import check_cache, free_blocks
from support.scheduler.scheduling import make_request
from tidewheel.errors import InternalError
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.kvcache.prefix import NO_HIT
from tidewheel.request import Request


def make_manager(num_blocks: int = 8, block_size: int = 4, *, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)


def enter(kv: KVCacheManager, row: int, request: Request, *, commit: bool = True) -> int:
    """Gives the request a table, as if all its tokens were computed; the tokens that were there already."""
    hit = kv.prefixes.find(request)
    assert kv.allocate(row, request.num_tokens, hit)
    if commit:
        kv.commit(row, request, request.num_tokens)
    check_cache(kv)
    return hit.num_tokens


def test_a_prefix_is_found_once_it_is_committed() -> None:
    kv = make_manager()
    first, second = make_request("a", 9), make_request("b", 9)
    assert enter(kv, 0, first, commit=False) == 0
    assert kv.prefixes.find(second) == NO_HIT
    kv.commit(0, first, 7)  # one full block and a part
    assert kv.prefixes.find(second).num_tokens == 4
    kv.commit(0, first, 9)
    hit = kv.prefixes.find(second)
    assert hit.num_tokens == 8
    assert hit.block_ids == tuple(kv.block_table(0)[:2])


def test_a_hit_leaves_one_token_to_compute() -> None:
    kv = make_manager()
    assert enter(kv, 0, make_request("a", 8)) == 0
    assert kv.prefixes.find(make_request("b", 8)).num_tokens == 4
    assert kv.prefixes.find(make_request("c", 9)).num_tokens == 8
    assert kv.prefixes.find(make_request("d", 4)).num_tokens == 0


def test_salts_do_not_share_and_one_salt_does() -> None:
    kv = make_manager()
    enter(kv, 0, make_request("a", 9, cache_salt="x"))
    assert kv.prefixes.find(make_request("b", 9, cache_salt="y")) == NO_HIT
    assert kv.prefixes.find(make_request("c", 9)) == NO_HIT
    assert kv.prefixes.find(make_request("d", 9, cache_salt="x")).num_tokens == 8


def test_shared_blocks_are_counted_once_and_kept_until_the_last_holder_leaves() -> None:
    kv = make_manager(8)
    first, second = make_request("a", 9), make_request("b", 9)
    enter(kv, 0, first)
    assert enter(kv, 1, second) == 8
    assert kv.num_free_blocks == 8 - 4
    kv.free(0)
    assert kv.num_free_blocks == 8 - 3
    kv.free(1)
    assert (kv.num_free_blocks, kv.update_stats().num_cached_blocks) == (8, 2)
    assert enter(kv, 2, make_request("c", 9)) == 8


def test_allocate_is_all_or_nothing() -> None:
    kv = make_manager(4)
    enter(kv, 0, make_request("a", 8))
    kv.free(0)
    wide = make_request("b", 20)
    hit = kv.prefixes.find(wide)
    assert hit.num_tokens == 8
    assert not kv.allocate(1, 20, hit)  # five blocks in all
    assert (kv.num_free_blocks, kv.update_stats().num_cached_blocks) == (4, 2)
    check_cache(kv)
    assert kv.allocate(1, 16, hit)


def test_cached_blocks_that_are_hit_do_not_count_as_room_for_others() -> None:
    kv = make_manager(2)
    enter(kv, 0, make_request("a", 8))
    kv.free(0)
    request = make_request("b", 12)
    assert not kv.allocate(1, 12, kv.prefixes.find(request))  # both free blocks are the hit itself


def test_keep_free_is_left() -> None:
    kv = make_manager(4)
    assert not kv.allocate(0, 12, keep_free=2)
    assert kv.allocate(0, 12, keep_free=1)


def test_grow_is_all_or_nothing() -> None:
    kv = make_manager(4)
    enter(kv, 0, make_request("a", 4), commit=False)
    enter(kv, 1, make_request("b", 4), commit=False)
    new_blocks = kv.grow([0, 1])
    assert new_blocks == [kv.block_table(0)[1], kv.block_table(1)[1]]
    tables = kv.block_table(0), kv.block_table(1)
    assert kv.grow([0]) is None
    assert (kv.block_table(0), kv.block_table(1)) == tables


def test_the_tail_is_evicted_before_the_head() -> None:
    kv = make_manager(4)
    request = make_request("a", 16)
    enter(kv, 0, request)
    head = kv.block_table(0)[0]
    kv.free(0)
    assert kv.allocate(1, 12)
    assert head not in kv.block_table(1)
    kv.free(1)
    assert kv.prefixes.find(make_request("b", 16)).block_ids == (head,)


def test_blocks_are_held_while_a_batch_in_flight_names_them() -> None:
    kv = make_manager(4)
    enter(kv, 0, make_request("a", 16), commit=False)
    kv.free(0, after_step=7)
    assert (kv.num_free_blocks, kv.transfers.num_returning_blocks()) == (0, 4)
    check_cache(kv)
    kv.transfers.done(6)
    assert kv.num_free_blocks == 0
    kv.transfers.done(7)
    assert (kv.num_free_blocks, kv.transfers.num_returning_blocks()) == (4, 0)


def test_held_blocks_that_another_row_shares_do_not_count_as_coming_back() -> None:
    kv = make_manager(8)
    enter(kv, 0, make_request("a", 9))
    enter(kv, 1, make_request("b", 9))
    kv.free(0, after_step=1)
    assert kv.transfers.num_returning_blocks() == 1
    kv.free(1, after_step=2)
    assert kv.transfers.num_returning_blocks() == 4
    kv.transfers.abandon()
    assert kv.num_free_blocks == 8


def test_what_is_forgotten_is_not_found() -> None:
    kv = make_manager()
    enter(kv, 0, make_request("a", 9))
    kv.forget(0)
    kv.free(0)
    assert kv.update_stats().num_cached_blocks == 0
    assert kv.prefixes.find(make_request("b", 9)) == NO_HIT


def test_blocks_that_one_row_is_computing_are_counted_up_to_those_of_another_row() -> None:
    kv = make_manager(24)
    short, long, late = make_request("a", 13), make_request("b", 25), make_request("c", 33)
    for row, request in enumerate((short, long)):
        hit = kv.prefixes.find(request)
        assert kv.allocate(row, request.num_tokens, hit)
        kv.prefixes.announce(row, request, hit)
    assert kv.prefixes.find_computing(late, kv.prefixes.find(late)) == (3, 0)
    kv.commit(0, short, 8)
    assert kv.prefixes.find_computing(late, kv.prefixes.find(late)) == (1, 0)
    kv.commit(0, short, 12)
    assert kv.prefixes.find_computing(late, kv.prefixes.find(late)) == (3, 1)
    kv.free(1)
    assert kv.prefixes.find_computing(late, kv.prefixes.find(late)) == (0, -1)
    check_cache(kv)


def test_without_prefix_caching_nothing_is_kept() -> None:
    kv = make_manager(enable_prefix_caching=False)
    enter(kv, 0, make_request("a", 9))
    assert kv.prefixes.find(make_request("b", 9)) == NO_HIT
    kv.free(0)
    assert (kv.num_free_blocks, kv.update_stats().num_cached_blocks) == (8, 0)


def test_a_row_has_one_table() -> None:
    kv = make_manager()
    enter(kv, 0, make_request("a", 4))
    with pytest.raises(InternalError, match="row 0"):
        kv.allocate(0, 4)


def test_queries_change_nothing() -> None:
    kv = make_manager(4)
    enter(kv, 0, make_request("a", 9))
    kv.free(0)
    request = make_request("b", 9)
    order = list(free_blocks(kv._pool))
    for _ in range(3):
        kv.prefixes.find(request)
    assert list(free_blocks(kv._pool)) == order
    assert kv.allocate(1, 4)
    block_table = kv.block_table(1)
    assert isinstance(block_table, tuple)


def test_check_invariants_sees_a_shared_writable_block() -> None:
    kv = make_manager()
    enter(kv, 0, make_request("a", 4), commit=False)
    enter(kv, 1, make_request("b", 4), commit=False)
    stolen = kv.block_table(0)[0]
    kv._pool.free([kv._tables[1][0]])
    kv._pool.touch([stolen])
    kv._tables[1][0] = stolen
    with pytest.raises(InternalError, match="writable block"):
        check_cache(kv)
