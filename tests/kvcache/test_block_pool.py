"""BlockPool: plain examples, and a state machine against a pool of plain lists and dicts."""

from __future__ import annotations

from itertools import takewhile

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.kvcache.invariants import check_pool, free_blocks
from tidewheel.errors import InternalError
from tidewheel.kvcache.block_pool import BlockPool

HASHES = [bytes([value]) * 32 for value in range(12)]


def take(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.allocate(count)
    assert block_ids is not None
    return block_ids


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    first = take(pool, 3)
    order = list(free_blocks(pool))
    assert pool.allocate(2) is None
    assert list(free_blocks(pool)) == order
    assert take(pool, 1) == order
    pool.free(first)
    check_pool(pool)


def test_cached_blocks_are_found_until_they_are_evicted_least_recently_used_first() -> None:
    pool = BlockPool(3)
    blocks = take(pool, 3)
    for block_id, block_hash in zip(blocks, HASHES, strict=False):
        pool.register_hashes([block_id], [block_hash])
    pool.free(blocks)
    assert (pool.num_free, pool.num_cached) == (3, 3)
    pool.touch([blocks[0]])  # used again: now it is the last to go
    pool.free([blocks[0]])
    assert list(free_blocks(pool)) == [blocks[1], blocks[2], blocks[0]]
    take(pool, 2)
    assert [pool.lookup(block_hash) for block_hash in HASHES[:3]] == [blocks[0], None, None]


def test_empty_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, empty = take(pool, 2)
    pool.register_hashes([cached], [HASHES[0]])
    pool.free([cached])
    pool.free([empty])
    assert cached not in take(pool, 3)
    assert take(pool, 1) == [cached]
    assert pool.lookup(HASHES[0]) is None


def test_the_first_block_with_a_content_keeps_its_name() -> None:
    pool = BlockPool(2)
    first, second = take(pool, 2)
    pool.register_hashes([first], [HASHES[0]])
    pool.register_hashes([second], [HASHES[0]])
    assert pool.lookup(HASHES[0]) == first
    assert pool.hash_of(second) is None


def test_a_kept_block_is_neither_free_nor_evicted() -> None:
    pool = BlockPool(3)
    kept, other = take(pool, 2)
    pool.register_hashes([kept], [HASHES[0]])
    pool.keep([kept])
    pool.free([kept, other])
    assert (pool.num_free, pool.num_kept, pool.num_cached) == (2, 1, 0)
    assert kept not in take(pool, 2)
    assert pool.allocate(1) is None
    pool.touch([kept])
    assert pool.num_kept == 0
    pool.free([kept])
    pool.release([kept])
    assert (pool.num_free, pool.num_kept, pool.num_cached) == (1, 0, 1)
    assert pool.lookup(HASHES[0]) == kept


def test_a_content_dropped_while_it_is_copied_leaves_when_the_copy_is_done() -> None:
    pool = BlockPool(1)
    slot = pool.insert(HASHES[0])
    assert slot is not None and pool.insert(HASHES[1]) is None
    pool.drop(HASHES[0])
    assert pool.lookup(HASHES[0]) is None and pool.insert(HASHES[1]) is None
    pool.free([slot])
    assert pool.insert(HASHES[1]) == slot


def test_without_blocks_nothing_fits() -> None:
    pool = BlockPool(0)
    assert pool.insert(HASHES[0]) is None
    pool.drop(HASHES[0])
    check_pool(pool)


@pytest.mark.parametrize("misuse", ["double free", "release", "hash of a free block", "second hash", "second block"])
def test_misuse_is_told(misuse: str) -> None:
    pool = BlockPool(2)
    used, freed = take(pool, 2)
    pool.register_hashes([used], [HASHES[0]])
    pool.free([freed])
    calls = {
        "double free": lambda: pool.free([freed]),
        "release": lambda: pool.release([used]),
        "hash of a free block": lambda: pool.register_hashes([freed], [HASHES[1]]),
        "second hash": lambda: pool.register_hashes([used], [HASHES[1]]),
        "second block": lambda: pool.insert(HASHES[0]),
    }
    with pytest.raises(InternalError, match="block"):
        calls[misuse]()
    check_pool(pool)


@pytest.mark.parametrize(
    "damage",
    ["ref_count", "empty", "cached", "num_kept", "hash"],
)
def test_check_invariants_sees_damage(damage: str) -> None:
    pool = BlockPool(4)
    blocks = take(pool, 3)
    pool.register_hashes([blocks[0]], [HASHES[0]])
    pool.free(blocks[:2])
    check_pool(pool)
    if damage == "ref_count":
        pool.ref_count[blocks[0]] = 1
    elif damage == "empty":
        pool._empty.append(pool._empty[0])
    elif damage == "cached":
        pool._empty.append(pool._cached.popitem()[0])
    elif damage == "num_kept":
        pool.num_kept += 1
    else:
        pool._blocks[HASHES[1]] = blocks[2]
    with pytest.raises(InternalError, match="invariant broken"):
        check_pool(pool)


class NaivePool:
    """The same promises, kept with a list in the order of eviction."""

    def __init__(self, num_blocks: int) -> None:
        self.order = list(range(num_blocks))
        self.references = dict.fromkeys(range(num_blocks), 0)
        self.hashes: dict[int, bytes] = {}
        self.keepers: list[int] = []

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.order):
            return None
        taken, self.order = self.order[:count], self.order[count:]
        for block_id in taken:
            self.references[block_id] = 1
            self.hashes.pop(block_id, None)
        return taken

    def free(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.references[block_id] -= 1
            self.set_aside(block_id)

    def set_aside(self, block_id: int) -> None:
        if self.references[block_id] == 0 and block_id not in self.keepers:
            self.order.insert(len(self.order) if block_id in self.hashes else 0, block_id)

    def touch(self, block_id: int) -> None:
        if block_id in self.order:
            self.order.remove(block_id)
        self.references[block_id] += 1

    def keep(self, block_id: int) -> None:
        if block_id in self.order:
            self.order.remove(block_id)
        self.keepers.append(block_id)

    def release(self, block_id: int) -> None:
        self.keepers.remove(block_id)
        self.set_aside(block_id)

    def lookup(self, block_hash: bytes) -> int | None:
        return next((block_id for block_id, known in self.hashes.items() if known == block_hash), None)


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(0, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.naive = NaivePool(num_blocks)

    def used(self) -> list[int]:
        return [block_id for block_id, count in self.naive.references.items() if count]

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        assert self.pool.allocate(count) == self.naive.allocate(count)

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.used()), unique=True, max_size=4))
        self.pool.free(blocks)
        self.naive.free(blocks)

    @rule(block_hash=st.sampled_from(HASHES))
    def touch_a_hit(self, block_hash: bytes) -> None:
        block_id = self.pool.lookup(block_hash)
        assert block_id == self.naive.lookup(block_hash)
        if block_id is not None:
            self.pool.touch([block_id])
            self.naive.touch(block_id)

    @rule(block_hash=st.sampled_from(HASHES))
    def keep_a_hit(self, block_hash: bytes) -> None:
        block_id = self.pool.lookup(block_hash)
        if block_id is not None:
            self.pool.keep([block_id])
            self.naive.keep(block_id)

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def keep_what_is_used(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.used()))
        self.pool.keep([block_id])
        self.naive.keep(block_id)

    @precondition(lambda self: self.naive.keepers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.naive.keepers)))
        self.pool.release([block_id])
        self.naive.release(block_id)

    @precondition(lambda self: set(self.used()) - self.naive.hashes.keys())
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def register_hash(self, data: st.DataObject, block_hash: bytes) -> None:
        block_id = data.draw(st.sampled_from(sorted(set(self.used()) - self.naive.hashes.keys())))
        self.pool.register_hashes([block_id], [block_hash])
        if self.naive.lookup(block_hash) is None:
            self.naive.hashes[block_id] = block_hash

    @rule(block_hash=st.sampled_from(HASHES))
    def insert(self, block_hash: bytes) -> None:
        if self.naive.lookup(block_hash) is None:
            block_id = self.pool.insert(block_hash)
            assert [block_id] == (self.naive.allocate(1) or [None])
            if block_id is not None:
                self.naive.hashes[block_id] = block_hash

    @rule(block_hash=st.sampled_from(HASHES))
    def drop(self, block_hash: bytes) -> None:
        self.pool.drop(block_hash)
        block_id = self.naive.lookup(block_hash)
        if block_id is not None:
            del self.naive.hashes[block_id]
            if block_id in self.naive.order:
                self.naive.order.remove(block_id)
                self.naive.set_aside(block_id)

    @invariant()
    def same_state(self) -> None:
        if not hasattr(self, "pool"):
            return
        check_pool(self.pool)
        assert list(free_blocks(self.pool)) == self.naive.order
        assert self.pool.ref_count == list(self.naive.references.values())
        assert {b: h for b in self.naive.references if (h := self.pool.hash_of(b))} == self.naive.hashes
        assert self.pool._keepers == {block: self.naive.keepers.count(block) for block in self.naive.keepers}
        for start in range(len(HASHES)):
            found = takewhile(lambda block: block is not None, map(self.naive.lookup, HASHES[start:]))
            assert self.pool.lookup_prefix(iter(HASHES[start:])) == tuple(found)
        kept = [block for block in set(self.naive.keepers) if self.naive.references[block] == 0]
        assert self.pool.num_kept == len(kept)
        assert self.pool.num_cached == sum(block_id in self.naive.hashes for block_id in self.naive.order)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.slow
class TestPoolMachineLong(PoolMachine.TestCase):
    settings = settings(max_examples=10_000, stateful_step_count=100, deadline=None)
