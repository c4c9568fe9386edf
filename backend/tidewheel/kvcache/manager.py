"""The KV cache as requests see it: block tables, prefix hits, and blocks that come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tidewheel.errors import InternalError
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.invariants import require
from tidewheel.kvcache.prefix import extend_block_hashes, max_hit_blocks
from tidewheel.request import Request


class PrefixHit(NamedTuple):
    """What the cache already holds of a request: whole blocks, from its first token on."""

    block_ids: tuple[int, ...]
    num_tokens: int


NO_HIT = PrefixHit((), 0)


class KVCacheManager:
    """A block table for every row, on one `BlockPool`.

    A block is written by one row only: what rows share is full, computed and has a hash, and new tokens go to blocks
    that a row took for itself. A row's blocks may be named by a batch in flight when the row ends; they are then
    held until that step is done (`free` with `after_step`, `step_done`).
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        if block_size < 1:
            raise InternalError(f"block_size is {block_size}: it must be at least 1")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, list[int]] = {}  # row → physical blocks, in logical order
        self._num_hashed: dict[int, int] = {}  # row → leading blocks whose content is committed
        self._held: dict[int, list[list[int]]] = {}  # step → tables to free when it is done

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Empty or evictable."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Evictable, content kept."""
        return self._pool.num_cached

    @property
    def num_held_blocks(self) -> int:
        """Blocks that become free when the batches in flight are done. Costs O(held)."""
        held = Counter(block_id for tables in self._held.values() for table in tables for block_id in table)
        return sum(self._pool.ref_count[block_id] == count for block_id, count in held.items())

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_table(self, row: int) -> Sequence[int]:
        return tuple(self._tables[row])

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix, block aligned, at least one token short of the request.

        Changes nothing but `request.block_hashes`, which remembers the digests.
        """
        if not self.enable_prefix_caching:
            return NO_HIT
        limit = max_hit_blocks(request.num_tokens, self.block_size)
        extend_block_hashes(request, limit, self.block_size)
        block_ids = []
        for block_hash in request.block_hashes[:limit]:
            block_id = self._pool.lookup(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return PrefixHit(tuple(block_ids), len(block_ids) * self.block_size)

    def allocate(self, row: int, num_tokens: int, hit: PrefixHit = NO_HIT, *, keep_free: int = 0) -> bool:
        """Gives a new row the blocks of `hit` and as many more as `num_tokens` tokens need.

        False, and nothing changed, unless `keep_free` blocks are still free afterwards.
        """
        if row in self._tables:
            raise InternalError(f"row {row} has a block table already")
        num_new = self.num_blocks_for(num_tokens) - len(hit.block_ids)
        num_revived = sum(self._pool.ref_count[block_id] == 0 for block_id in hit.block_ids)
        if num_new + num_revived + keep_free > self._pool.num_free:
            return False
        self._pool.touch(hit.block_ids)
        new_blocks = self._pool.allocate(num_new)
        if new_blocks is None:
            raise InternalError("the block pool has fewer blocks than it counted")
        self._tables[row] = [*hit.block_ids, *new_blocks]
        self._num_hashed[row] = len(hit.block_ids)
        return True

    def grow(self, rows: Sequence[int]) -> list[int] | None:
        """One more block at the end of each row's table; the new blocks, or None and nothing changed."""
        new_blocks = self._pool.allocate(len(rows))
        if new_blocks is None:
            return None
        tables = self._tables
        for row, block_id in zip(rows, new_blocks, strict=True):
            tables[row].append(block_id)
        return new_blocks

    def commit(self, row: int, request: Request, num_computed_tokens: int) -> None:
        """The KV of the row's first `num_computed_tokens` tokens is in the cache: its full blocks can be found."""
        if not self.enable_prefix_caching:
            return
        num_full = num_computed_tokens // self.block_size
        extend_block_hashes(request, num_full, self.block_size)
        table, hashes = self._tables[row], request.block_hashes
        for index in range(self._num_hashed[row], num_full):
            self._pool.register_hash(table[index], hashes[index])
        self._num_hashed[row] = num_full

    def forget(self, row: int) -> None:
        """Nothing that this row holds may be found any more: its content is not to be trusted."""
        for block_id in self._tables[row]:
            self._pool.drop_hash(block_id)

    def free(self, row: int, *, after_step: int | None = None) -> None:
        """Ends the row's table. With `after_step`, its blocks stay as they are until that step is done."""
        table = self._tables.pop(row)
        del self._num_hashed[row]
        if after_step is not None:
            self._held.setdefault(after_step, []).append(table)
        else:
            self._free_table(table)

    def step_done(self, step_id: int) -> None:
        """The batch of this step is no longer in flight."""
        for table in self._held.pop(step_id, ()):
            self._free_table(table)

    def all_steps_done(self) -> None:
        for step_id in list(self._held):
            self.step_done(step_id)

    def check_invariants(self) -> None:
        """Raises `InternalError` naming what is broken. O(num_blocks)."""
        self._pool.check_invariants()
        require(self._tables.keys() == self._num_hashed.keys(), "tables and commits name different rows")
        held = [table for tables in self._held.values() for table in tables]
        references = Counter(block_id for table in (*self._tables.values(), *held) for block_id in table)
        for block_id, count in enumerate(self._pool.ref_count):
            require(count == references[block_id], f"block {block_id}: {count} holders, {references[block_id]} named")
        for row, table in self._tables.items():
            require(len(set(table)) == len(table), f"row {row} names a block twice")
            for block_id in table[self._num_hashed[row] :]:
                require(self._pool.hash_of(block_id) is None, f"block {block_id} has a hash before its commit")
                require(references[block_id] == 1, f"writable block {block_id} is shared")

    def _free_table(self, table: list[int]) -> None:
        # The tail first: a prefix without its tail can be hit, a tail without its prefix cannot.
        self._pool.free(table[::-1])
