"""Checks of the cache's tables against each other, at any time between two calls of its manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from tidewheel.errors import require
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.kvcache.sessions import SessionStore
from tidewheel.kvcache.transfers import TransferQueue
from tidewheel.tenants import account_of


def check_cache(kv: KVCacheManager) -> None:
    """Check block tables, pool, host tier and sessions. Raise `InternalError`."""
    check_pool(kv._pool)
    check_pool(kv._host)
    check_sessions(kv.sessions)
    tables, num_sealed = kv._tables, kv._num_sealed
    require(tables.keys() == num_sealed.keys(), "tables and commits name different rows")
    require(tables.keys() >= set(kv.prefixes.computing.values()), "rows that left are computing blocks")
    for row, arrival in kv.transfers.arrivals.items():
        require(len(arrival.slots) == len(arrival.blocks), f"row {row} reads slots into no blocks")
    named = Counter(chain(held_blocks(kv.transfers), *tables.values()))
    references = named + Counter(held_sources(kv.transfers))
    for block_id, count in enumerate(kv._pool.ref_count):
        require(count == references[block_id], f"block {block_id}: {count} holders, {references[block_id]} named")
    for row, table in tables.items():
        require(len(set(table)) == len(table), f"row {row} names a block twice")
        for block_id in table[num_sealed[row] :]:
            require(kv._pool.hash_of(block_id) is None, f"block {block_id} has a hash before its commit")
            require(named[block_id] == 1, f"writable block {block_id} is shared")
            require(kv._pool._keepers.get(block_id, 0) == 0, f"writable block {block_id} is a session's")


def held_blocks(transfers: TransferQueue) -> list[int]:
    """Return the blocks of rows that left and of sessions brought back, held by steps in flight."""
    return [block_id for step in transfers._steps.values() for block_id in step.blocks]


def held_sources(transfers: TransferQueue) -> list[int]:
    """Return the blocks that copies inside the pool read, queued or in flight."""
    queued = [block_id for arrival in transfers.arrivals.values() for block_id in arrival.copy_sources]
    return queued + [block_id for step in transfers._steps.values() for block_id in step.sources]


def check_sessions(store: SessionStore) -> None:
    every, tenants = store._sessions, store.limits.tenants
    resident = [name for name, session in every.items() if session.blocks and session.pause is None]
    require(resident == list(store._resident), "sessions with blocks are listed wrongly")
    paused = {name for name, session in every.items() if session.pause is not None}
    require(paused == store._paused.keys(), "sessions that pause are listed wrongly")
    slots = Counter(slot for session in every.values() for slot in session.host_slots)
    host = store._host
    kept = {slot: count for slot in range(host.num_blocks) if (count := host._keepers.get(slot, 0))}
    require(slots == kept, "slots of sessions are kept wrongly")
    shares = Counter[str]()
    for tenant, of_tenant in store._tenants.items():
        own = {name: session for (of, name), session in every.items() if of == tenant}
        require(list(own) == list(of_tenant) and bool(own), f"sessions of {tenant!r} are listed wrongly")
        count = sum(len(session.blocks) for session in own.values())
        require(count == store.num_blocks(tenant), f"blocks of tenant {tenant!r} are miscounted")
        counted = store._members[account_of(tenants, tenant)][tenant]
        require(counted == len(own), f"sessions of {tenant!r} are miscounted")
        shares[store._share_of(tenant)] += count
    require(+shares == store._held, "blocks of shares are miscounted")
    totals = {account: members.total() for account, members in store._members.items()}
    require(totals == store._accounts, "accounts are miscounted")
    require(store._accounts.total() == len(every), "a session belongs to no tenant")
    waiting = {id(event.subject) for event in store._expiries._heap}
    require(all(id(session) in waiting for session in every.values()), "a session never expires")
    require(len(every) <= store.limits.max_sessions, "there are too many sessions")


def free_blocks(pool: BlockPool) -> Iterator[int]:
    """Yield free blocks in the order in which `allocate` takes them."""
    yield from reversed(pool._empty)
    yield from pool._cached


def check_pool(pool: BlockPool) -> None:
    free, hashes = set(free_blocks(pool)), pool._hashes
    require(len(free) == pool.num_free, "a block is twice among the free ones")
    for block_id in free:
        require(pool.ref_count[block_id] == 0, f"block {block_id} is free and in use")
        require(block_id not in pool._keepers, f"block {block_id} is free and kept")
        is_cached = hashes[block_id] is not None
        require((block_id in pool._cached) == is_cached, f"block {block_id} is empty and cached")
    num_used = pool.num_blocks - pool.ref_count.count(0)
    num_kept = sum(pool.ref_count[block_id] == 0 for block_id in pool._keepers)
    require(num_kept == pool.num_kept, f"{num_kept} blocks are kept, not {pool.num_kept}")
    require(num_used + num_kept + len(free) == pool.num_blocks, "a block is in no state or in two")
    hashed = {h: block_id for block_id, h in enumerate(hashes) if h is not None}
    require(hashed == pool._blocks, "blocks and their hashes disagree")
