from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from tidewheel.batch import TransferArrays
from tidewheel.errors import InternalError
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.prefix import NO_HIT, PrefixCache, PrefixHit, extend_block_hashes
from tidewheel.kvcache.sessions import SessionLimits, SessionStore
from tidewheel.kvcache.transfers import IncomingBlocks, TransferQueue
from tidewheel.request import Request
from tidewheel.stats import EngineStats


class FreedBlockCounter:
    """Counter of blocks, other than `kept`, that become free if several rows leave."""

    def __init__(self, ref_count: Sequence[int], tables: Mapping[int, Sequence[int]], kept: Collection[int]) -> None:
        self._ref_count = ref_count
        self._tables = tables
        self._kept = frozenset(kept)
        self._holders: Counter[int] = Counter()

    def add(self, row: int) -> int:
        self._holders.update(self._tables[row])
        return self.num_freed(row)

    def take_back(self, row: int) -> None:
        self._holders.subtract(self._tables[row])

    def num_freed(self, row: int) -> int:
        holders, ref_count, kept = self._holders, self._ref_count, self._kept
        return sum([holders[b] == ref_count[b] and b not in kept for b in self._tables[row]])


class KVCacheManager:
    """Block tables of rows, with cached prefixes, sessions and a host tier.

    Shared blocks are full and computed; new tokens go to a row's own. Steps in flight hold their blocks.
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
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.stats = EngineStats(num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        self._pool = BlockPool(num_blocks)
        self._host = BlockPool(num_host_blocks)
        self.transfers = TransferQueue(self._pool, self._host, self.stats)
        limits = session_limits or SessionLimits()
        self.sessions = SessionStore(self._pool, self._host, self.transfers, limits, block_size)
        self.prefixes = PrefixCache(
            self._pool, self._host, self.sessions.get, block_size, is_enabled=enable_prefix_caching
        )
        self._tables: dict[int, list[int]] = {}  # row → blocks
        self._num_sealed: dict[int, int] = {}  # row → full, computed blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free + self._pool.num_kept

    def update_stats(self) -> EngineStats:
        stats = self.stats
        stats.num_free_blocks = self.num_free_blocks
        stats.num_cached_blocks = self._pool.num_cached
        stats.num_free_host_blocks = self._host.num_free + self._host.num_kept
        stats.num_sessions = len(self.sessions)
        stats.num_paused_sessions = self.sessions.num_paused
        stats.num_session_blocks = self._pool.num_kept
        return stats

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_table(self, row: int) -> Sequence[int]:
        return tuple(self._tables[row])

    def fork_hit(self, leader_row: int, request: Request) -> PrefixHit:
        """Return the prompt in `leader_row`, without its last token, as a hit for another sequence of the request."""
        if leader_row in self.transfers.arrivals:
            return NO_HIT
        num_tokens, table = request.num_prompt_tokens - 1, self._tables[leader_row]
        num_full = num_tokens // self.block_size
        self._seal(leader_row, request, num_full)
        tail_block = table[num_full] if num_tokens % self.block_size else -1
        return PrefixHit(tuple(table[:num_full]), num_tokens, tail_block=tail_block)

    def num_missing_blocks(self, num_tokens: int, hit: PrefixHit = NO_HIT, *, keep_free: int = 0) -> int:
        """Return how many free blocks a new row lacks beside a reserve of `keep_free`; 0 or less: none."""
        ref_count = self._pool.ref_count
        num_shared = len(hit.block_ids) - list(map(ref_count.__getitem__, hit.block_ids)).count(0)
        num_pinned = int(keep_free > 0 and hit.tail_block >= 0 and ref_count[hit.tail_block] == 0)
        return self.num_blocks_for(num_tokens) - num_shared + num_pinned + keep_free - self.num_free_blocks

    def allocate(self, row: int, num_tokens: int, hit: PrefixHit = NO_HIT, *, keep_free: int = 0) -> bool:
        """Give a new row the cached prefix and new blocks; return False, without effect, if blocks are short.

        The row copies a session's partial last block (tail), or takes it over if no block is left.
        """
        if row in self._tables:
            raise InternalError(f"row {row} has a block table already")
        num_missing = self.num_missing_blocks(num_tokens, hit, keep_free=keep_free)
        slots = self.prefixes.slots_of(hit)
        if num_missing > 0 or slots is None:
            return False
        num_new = self.num_blocks_for(num_tokens) - len(hit.block_ids)
        new_blocks = self._take_and_fill(row, num_new, hit, slots, num_left=keep_free - num_missing)
        self._tables[row] = [*hit.block_ids, *new_blocks]
        self._num_sealed[row] = len(hit.block_ids)
        num_host_hits = len(hit.host_keys) * self.block_size
        if hit.tail_key:
            num_host_hits += hit.num_tokens % self.block_size
        self.stats.num_hit_queries += num_tokens
        self.stats.num_host_hits += num_host_hits
        self.stats.num_device_hits += hit.num_tokens - num_host_hits
        return True

    def _take_and_fill(self, row: int, num_new: int, hit: PrefixHit, slots: list[int], *, num_left: int) -> list[int]:
        sources = [hit.tail_block] if hit.tail_block >= 0 else []
        takes_over = bool(sources) and num_left < 1 and self._pool.ref_count[hit.tail_block] == 0
        if takes_over and hit.session is not None:
            self.sessions.surrender_tail(hit.session)
        self._pool.touch(hit.block_ids)
        if not slots and not sources:
            return self._take(num_new)
        self._host.touch(slots)
        self._pool.touch(sources)
        own, first = self._take(num_new - takes_over), len(hit.host_keys)
        if takes_over:
            own.insert(first, sources.pop())
        targets = own[first : first + len(sources)]
        self.transfers.arrivals[row] = IncomingBlocks(hit.host_keys, slots, own[: len(slots)], sources, targets)
        return own

    def _take(self, count: int) -> list[int]:
        self.sessions.reclaim(count)
        blocks = self._pool.allocate(count)
        if blocks is None:
            raise InternalError("the block pool has fewer blocks than it counted")
        return blocks

    def grow(self, rows: Sequence[int]) -> list[int] | None:
        """Add a block to each row and return the blocks; None, without effect, if too few are free."""
        if len(rows) > self.num_free_blocks:
            return None
        new_blocks = self._take(len(rows))
        for row, block_id in zip(rows, new_blocks, strict=True):
            self._tables[row].append(block_id)
        return new_blocks

    def trim(self, row: int, num_blocks: int) -> None:
        """Free all but the first blocks of a row, which have no hash yet and which no step in flight uses."""
        table = self._tables[row]
        if len(table) > num_blocks:
            self._pool.free(table[num_blocks:][::-1])
            del table[num_blocks:]

    def commit(self, row: int, request: Request, num_computed_tokens: int) -> None:
        if self.prefixes.is_enabled and row not in self.transfers.arrivals:
            self._seal(row, request, num_computed_tokens // self.block_size)

    def _seal(self, row: int, request: Request, num_full: int) -> None:
        first = self._num_sealed[row]
        if first >= num_full:
            return
        if self.prefixes.is_enabled:
            extend_block_hashes(request, num_full, self.block_size)
            hashes = request.block_hashes[first:num_full]
            self._pool.register_hashes(self._tables[row][first:num_full], hashes)
            self.prefixes.drop_announced(row, hashes)
        self._num_sealed[row] = num_full

    def offload(self, row: int, request: Request, num_computed_tokens: int) -> int:
        """Queue copies of a row's full blocks to the host tier, before `free`; return how many the tier will hold."""
        self.commit(row, request, num_computed_tokens)
        sealed = self._num_sealed[row]
        self.sessions.make_host_room(sealed)
        return self.transfers.swap_out(self._tables[row], request.block_hashes[:sealed])

    def keep_session(self, row: int, request: Request, num_computed_tokens: int, now: float) -> None:
        """Keep the computed tokens for the request's session. Call before `free`."""
        if self.prefixes.is_enabled and request.session_id and row not in self.transfers.arrivals:
            self.commit(row, request, num_computed_tokens)
            self.sessions.keep(request, self._tables[row], num_computed_tokens, now)

    def forget(self, row: int) -> None:
        for block_id in self._tables[row]:
            block_hash = self._pool.hash_of(block_id)
            self._host.drop(block_hash)
            self._pool.drop(block_hash)

    def departures(self, kept: Collection[int] = ()) -> FreedBlockCounter:
        return FreedBlockCounter(self._pool.ref_count, self._tables, kept)

    def free(self, row: int, *, after_step: int | None = None) -> None:
        """End a row's block table. Its blocks stay in use until the step `after_step` is done."""
        # Evict the last block first: a prefix is useful without its tail.
        table = self._tables.pop(row)[::-1]
        del self._num_sealed[row]
        self.prefixes.drop_announced(row)
        self.transfers.cancel(row)
        if after_step is None:
            self._pool.free(table)
        else:
            self.transfers.hold(table, after_step)

    def take_transfers(self, step_id: int, *, keep_free: int = 0) -> TransferArrays:
        self.sessions.prefetch(keep_free)
        transfers, arrivals = self.transfers.take(step_id)
        for row, arrival in arrivals.items():  # Full blocks arrive before the batch computes, so rows may share them.
            first = self._num_sealed[row]
            self._num_sealed[row] = end = first + len(arrival.keys)
            self._pool.register_hashes(self._tables[row][first:end], arrival.keys)
        return transfers
