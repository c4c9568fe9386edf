"""The KV cache as requests see it: block tables, prefix hits, sessions, and blocks that come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from tidewheel.errors import InternalError
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.finder import PrefixFinder
from tidewheel.kvcache.hits import NO_HIT, PrefixHit
from tidewheel.kvcache.host_tier import HostTier
from tidewheel.kvcache.invariants import require
from tidewheel.kvcache.prefix import extend_block_hashes, max_hit_blocks
from tidewheel.kvcache.session_store import SessionStore
from tidewheel.kvcache.sessions import SessionLimits
from tidewheel.kvcache.transfers import Arrival, TransferQueue, Transfers
from tidewheel.request import Request
from tidewheel.stats import EngineStats


class Departures:
    """Counts the blocks that only departing rows hold, as rows are added and taken back."""

    def __init__(self, ref_count: Sequence[int], tables: Mapping[int, Sequence[int]], kept: set[int]) -> None:
        self._ref_count = ref_count
        self._tables = tables
        self._kept = kept
        self._holders: Counter[int] = Counter()  # departing rows that hold each block

    def add(self, row: int) -> int:
        """Return how many more blocks are free if this row leaves too."""
        self._holders.update(self._tables[row])
        return self.num_freed(row)

    def take_back(self, row: int) -> None:
        """Let a row that was added stay."""
        self._holders.subtract(self._tables[row])

    def num_freed(self, row: int) -> int:
        """Return how many blocks of this row are free if all that were added leave."""
        holders, ref_count, kept = self._holders, self._ref_count, self._kept
        return sum([holders[b] == ref_count[b] and b not in kept for b in self._tables[row]])


class KVCacheManager:
    """A block table for every row, on one `BlockPool`, with a `HostTier` and sessions behind it.

    A block is written by one row only: what rows share is full and computed, and new tokens go to blocks that a row
    took for itself. A row's blocks may be named by a batch in flight when the row ends; they are then held until that
    step is done (`free` with `after_step`, `step_done`).

    Copies that a batch must carry out are queued by `allocate`, `offload` and whatever gives up sessions; every batch
    takes all of them (`take_transfers`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
        session_limits: SessionLimits | None = None,
    ) -> None:
        if block_size < 1:
            raise InternalError(f"block_size is {block_size}: it must be at least 1")
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = EngineStats(num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        self._pool = BlockPool(num_blocks)
        self._host = HostTier(num_host_blocks)
        self._transfers = TransferQueue(self._pool, self._host, self.stats)
        limits = session_limits or SessionLimits()
        self._sessions = SessionStore(self._pool, self._host, self._transfers, limits, block_size)
        self._finder = PrefixFinder(self._pool, self._host, self._sessions, block_size)
        self._computing: dict[bytes, int] = {}  # digest of a prompt's block → row that is computing it
        self._announced: dict[int, list[bytes]] = {}  # row → digests of its blocks that it may be computing
        self._tables: dict[int, list[int]] = {}  # row → physical blocks, in logical order
        self._num_sealed: dict[int, int] = {}  # row → leading blocks that are full, computed and never written again
        self._held: dict[int, list[list[int]]] = {}  # step → tables to free when it is done

    # --- figures ------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Empty, evictable, or held by sessions alone, which give way."""
        return self._pool.num_free + self._pool.num_kept

    @property
    def num_held_blocks(self) -> int:
        """Blocks that become free when the batches in flight are done. Costs O(held)."""
        held = Counter(block_id for tables in self._held.values() for table in tables for block_id in table)
        held.update(self._transfers.carried_sources())
        return sum(self._pool.ref_count[block_id] == count for block_id, count in held.items())

    def update_stats(self) -> EngineStats:
        """Bring the cache's figures in `stats` up to date and return them; the struct is the same at each call."""
        stats = self.stats
        stats.num_free_blocks = self.num_free_blocks
        stats.num_cached_blocks = self._pool.num_cached
        stats.num_free_host_blocks = self._host.num_free_slots
        stats.num_sessions = len(self._sessions)
        stats.num_session_blocks = self._pool.num_kept
        return stats

    def session_blocks(self, tenant: str) -> int:
        """Blocks in the pool that the tenant's sessions keep, those that running requests share too."""
        return self._sessions.num_blocks(tenant)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_table(self, row: int) -> Sequence[int]:
        return tuple(self._tables[row])

    # --- what is there already ----------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix, at least one token short of the request: whole blocks of the pool, then of the
        host tier, then the tail of its session.

        Changes nothing but `request.block_hashes`, which remembers the digests. The hit is good until the manager
        changes.
        """
        return self._finder.find(request) if self.enable_prefix_caching else NO_HIT

    def num_cached_tokens(self, request: Request) -> int:
        """Estimate the cached prefix of a waiting request, in O(log blocks) once its digests are known."""
        return self._finder.estimate(request) if self.enable_prefix_caching else 0

    def find_computing(self, request: Request, hit: PrefixHit) -> tuple[int, int]:
        """Return how many blocks behind the hit a row is computing right now, and that row; (0, -1): none."""
        row, count = -1, 0
        for block_hash in request.block_hashes[hit.num_blocks : max_hit_blocks(request.num_tokens, self.block_size)]:
            found = self._computing.get(block_hash, -1)
            if found < 0 or (count and found != row):
                break
            row, count = found, count + 1
        return count, row

    def fork_hit(self, leader_row: int, request: Request) -> PrefixHit:
        """The prompt of the request, of which one token is left to compute, in the row of another one that has the
        same prompt, tenant and salt. The row must have computed as much of it; while its own content is still to
        arrive with the next batch, there is nothing to fork."""
        if self._transfers.is_arriving(leader_row):
            return NO_HIT
        num_tokens = request.num_prompt_tokens - 1
        num_full = num_tokens // self.block_size
        self._seal(leader_row, request, num_full)
        table = self._tables[leader_row]
        tail_block = table[num_full] if num_tokens % self.block_size else -1
        return PrefixHit(tuple(table[:num_full]), num_tokens, tail_block=tail_block)

    # --- the life of a row --------------------------------------------------------------------------------------

    def num_missing_blocks(self, num_tokens: int, hit: PrefixHit = NO_HIT, *, keep_free: int = 0) -> int:
        """Return how many free blocks are missing for a row of `num_tokens` tokens; at most 0: it can be allocated.

        `keep_free` blocks must be free afterwards, beside one that the next batch copies from. Blocks of the hit that
        no row holds are free now and are needed.
        """
        ref_count = self._pool.ref_count
        num_revived = sum([ref_count[block_id] == 0 for block_id in hit.block_ids])
        num_new = self.num_blocks_for(num_tokens) - len(hit.block_ids)
        num_pinned = int(keep_free > 0 and hit.tail_block >= 0 and ref_count[hit.tail_block] == 0)
        return num_new + num_revived + num_pinned + keep_free - self.num_free_blocks

    def allocate(self, row: int, num_tokens: int, hit: PrefixHit = NO_HIT, *, keep_free: int = 0) -> bool:
        """Give a new row the blocks of `hit` and as many more as `num_tokens` tokens need.

        Return False and change nothing while `num_missing_blocks` is above 0. The next batch must take the transfers
        that fill the row's own blocks. Where no block is left to copy a session's tail to, the row takes the tail
        over and the session goes on without it.
        """
        if row in self._tables:
            raise InternalError(f"row {row} has a block table already")
        num_missing = self.num_missing_blocks(num_tokens, hit, keep_free=keep_free)
        if num_missing > 0:
            return False
        num_new = self.num_blocks_for(num_tokens) - len(hit.block_ids)
        if hit.is_shared_only:
            self._pool.touch(hit.block_ids)
            new_blocks = self._take(num_new)
        else:
            slots = self._slots_of(hit)
            if slots is None:
                return False
            new_blocks = self._take_and_fill(row, num_new, hit, slots, num_left=keep_free - num_missing)
        self._tables[row] = [*hit.block_ids, *new_blocks]
        self._num_sealed[row] = len(hit.block_ids)
        self._count_hits(num_tokens, hit)
        return True

    def announce(self, row: int, request: Request, hit: PrefixHit) -> None:
        """Let `find_computing` find the blocks that the row, just allocated, is to compute."""
        self._announced[row] = announced = request.block_hashes[
            hit.num_blocks : request.num_tokens // self.block_size
        ]
        for block_hash in announced:
            self._computing.setdefault(block_hash, row)

    def _slots_of(self, hit: PrefixHit) -> tuple[int, ...] | None:
        """Where the host tier has the contents of the hit; None if it has lost one since."""
        keys = (*hit.host_keys, hit.tail_key) if hit.tail_key else hit.host_keys
        slots = tuple(slot for key in keys if (slot := self._host.lookup(key)) is not None)
        return slots if len(slots) == len(keys) else None

    def _take_and_fill(
        self, row: int, num_new: int, hit: PrefixHit, slots: tuple[int, ...], *, num_left: int
    ) -> list[int]:
        """The row's own blocks, of which the first are filled by transfers."""
        pool, source = self._pool, hit.tail_block
        takes_over = source >= 0 and num_left < 1 and pool.ref_count[source] == 0
        if takes_over and hit.session is not None:
            self._sessions.surrender_tail(hit.session)
        pool.touch(hit.block_ids)
        self._transfers.pin(slots, source)
        if takes_over:
            own = self._take(num_new - 1)
            own.insert(len(hit.host_keys), source)  # the pin is the row's hold on it
            source = target = -1
        else:
            own = self._take(num_new)
            target = own[len(hit.host_keys)] if source >= 0 else -1
        self._transfers.arrive(row, Arrival(hit.host_keys, slots, tuple(own[: len(slots)]), source, target))
        return own

    def _take(self, count: int) -> list[int]:
        if self._pool.num_free < count:
            self._sessions.reclaim(count)
        blocks = self._pool.allocate(count)
        if blocks is None:
            raise InternalError("the block pool has fewer blocks than it counted")
        return blocks

    def _count_hits(self, num_tokens: int, hit: PrefixHit) -> None:
        stats = self.stats
        stats.num_hit_queries += num_tokens
        if hit.num_tokens:
            num_host = len(hit.host_keys) * self.block_size
            if hit.tail_key:
                num_host += hit.num_tokens % self.block_size
            stats.num_host_hits += num_host
            stats.num_device_hits += hit.num_tokens - num_host
            stats.num_session_hits += hit.num_session_tokens

    def grow(self, rows: Sequence[int]) -> list[int] | None:
        """One more block at the end of each row's table; the new blocks, or None and nothing changed."""
        new_blocks = self._pool.allocate(len(rows))
        if new_blocks is None:
            if len(rows) > self.num_free_blocks:
                return None
            new_blocks = self._take(len(rows))
        tables = self._tables
        for row, block_id in zip(rows, new_blocks, strict=True):
            tables[row].append(block_id)
        return new_blocks

    def commit(self, row: int, request: Request, num_computed_tokens: int) -> None:
        """The KV of the row's first `num_computed_tokens` tokens is in the cache: its full blocks can be found."""
        if self.enable_prefix_caching and not self._transfers.is_arriving(row):
            self._seal(row, request, num_computed_tokens // self.block_size)

    def _seal(self, row: int, request: Request, num_full: int) -> None:
        """The row's first `num_full` blocks are full and computed."""
        first = self._num_sealed[row]
        if first >= num_full:
            return
        if self.enable_prefix_caching:
            extend_block_hashes(request, num_full, self.block_size)
            hashes = request.block_hashes[first:num_full]
            self._pool.register_hashes(self._tables[row][first:num_full], hashes)
            if self._computing:
                self._stop_computing(row, hashes)
        self._num_sealed[row] = num_full

    def _stop_computing(self, row: int, block_hashes: Sequence[bytes]) -> None:
        for block_hash in block_hashes:
            if self._computing.get(block_hash) == row:
                del self._computing[block_hash]

    def offload(self, row: int, request: Request, num_computed_tokens: int) -> int:
        """Before `free`, of a row that will come back: its computed full blocks go to the host tier with the next
        batch. Blocks that are there then, from the first on; 0: none fits."""
        self.commit(row, request, num_computed_tokens)
        table, sealed = self._tables[row], self._num_sealed[row]
        for index, key in enumerate(request.block_hashes[:sealed]):
            if not self._transfers.swap_out(table[index], key):
                return index
        return sealed

    def keep_session(self, row: int, request: Request, num_computed_tokens: int, now: float) -> None:
        """Before `free`, at the end of a request that names a session: what it has computed is the session now, for
        `request.session_ttl` seconds from `now`. Not to be called where the content is not to be trusted."""
        if self.enable_prefix_caching and request.session_id and not self._transfers.is_arriving(row):
            self.commit(row, request, num_computed_tokens)
            self._sessions.keep(request, self._tables[row], num_computed_tokens, now)

    def expire_sessions(self, now: float) -> None:
        """Ends the sessions whose time is over."""
        self._sessions.expire(now)

    def close_session(self, tenant: str, session_id: str) -> None:
        """Raises `NotFound`. A request that uses it goes on, and keeps it anew when it ends."""
        self._sessions.close(tenant, session_id)

    def forget(self, row: int) -> None:
        """Nothing that this row holds may be found any more: its content is not to be trusted."""
        for block_id in self._tables[row]:
            block_hash = self._pool.hash_of(block_id)
            if block_hash is not None:
                self._host.drop(block_hash)
            self._pool.drop_hash(block_id)

    def departures(self, kept: Collection[int] = ()) -> Departures:
        """Return a tally of rows that might leave, which counts the blocks that would be free then.

        Blocks in `kept` do not count: they are needed again at once.
        """
        return Departures(self._pool.ref_count, self._tables, set(kept))

    def free(self, row: int, *, after_step: int | None = None) -> None:
        """End the row's table. With `after_step`, its blocks stay as they are until that step is done."""
        table = self._tables.pop(row)
        del self._num_sealed[row]
        self._stop_computing(row, self._announced.pop(row, ()))
        self._transfers.cancel(row)
        if after_step is not None:
            self._held.setdefault(after_step, []).append(table)
        else:
            self._free_table(table)

    # --- batches ------------------------------------------------------------------------------------------------

    def take_transfers(self, step_id: int) -> Transfers:
        """What this step's batch must copy. What it reads and fills is held until `step_done(step_id)`."""
        transfers, arrivals = self._transfers.take(step_id)
        for row, arrival in arrivals.items():
            self._seal_arrived(row, arrival)
        return transfers

    def _seal_arrived(self, row: int, arrival: Arrival) -> None:
        """Full blocks from the host tier can be shared from this batch on: they are there before it computes."""
        table, first = self._tables[row], self._num_sealed[row]
        self._num_sealed[row] = first + len(arrival.keys)
        self._pool.register_hashes(table[first : self._num_sealed[row]], arrival.keys)

    def step_done(self, step_id: int) -> None:
        """The batch of this step is no longer in flight."""
        self._transfers.done(step_id)
        for table in self._held.pop(step_id, ()):
            self._free_table(table)

    def all_steps_done(self) -> None:
        """No batch is in flight any more, and those that were may never have run: their transfers count as failed,
        and what they left behind cannot be found. Rows that are still there must be forgotten before they go."""
        self._transfers.abandon()
        for block_id in {block_id for tables in self._held.values() for table in tables for block_id in table}:
            self._pool.drop_hash(block_id)
        for step_id in list(self._held):
            self.step_done(step_id)

    def check_invariants(self) -> None:
        """Raises `InternalError` naming what is broken. O(blocks)."""
        self._pool.check_invariants()
        self._host.check_invariants()
        self._transfers.check_invariants()
        self._sessions.check_invariants()
        require(self._tables.keys() == self._num_sealed.keys(), "tables and commits name different rows")
        held = [table for tables in self._held.values() for table in tables]
        named = Counter(block_id for table in (*self._tables.values(), *held) for block_id in table)
        references = named + Counter(self._transfers.held_sources())
        require(self._tables.keys() >= set(self._computing.values()), "blocks of rows that left are being computed")
        for block_id, count in enumerate(self._pool.ref_count):
            require(count == references[block_id], f"block {block_id}: {count} holders, {references[block_id]} named")
        for row, table in self._tables.items():
            require(len(set(table)) == len(table), f"row {row} names a block twice")
            for block_id in table[self._num_sealed[row] :]:
                require(self._pool.hash_of(block_id) is None, f"block {block_id} has a hash before its commit")
                require(named[block_id] == 1, f"writable block {block_id} is shared")
                require(self._pool.num_keepers(block_id) == 0, f"writable block {block_id} is a session's")

    def _free_table(self, table: list[int]) -> None:
        # The tail first: a prefix without its tail can be hit, a tail without its prefix cannot.
        self._pool.free(table[::-1])
