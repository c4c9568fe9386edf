"""The physical blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidewheel.errors import InternalError
from tidewheel.kvcache.invariants import require


class BlockPool:
    """Hands out blocks ``0 … num_blocks - 1`` and remembers the content of those that were given back.

    A block is in one of four states:

    * *in use*: ``ref_count > 0``, not in the free list. It gets a hash once it is full and its content is computed;
      from then on it is never written, and may be shared (``ref_count > 1``).
    * *kept*: ``ref_count == 0``, but somebody wants its content (`keep`): not in the free list, not evicted.
    * *cached*: ``ref_count == 0`` with a hash, in the free list: `lookup` finds it, `allocate` may evict it.
    * *empty*: ``ref_count == 0`` without a hash, in the free list.

    Moves: `allocate` empty → in use, or cached → in use (its hash is dropped: eviction); `touch` cached, kept → in
    use (its content is used again); `free` in use → kept, cached or empty, when the last holder leaves; `keep` cached
    → kept; `release` kept → cached or empty, when the last keeper leaves. Keepers may come and go while it is in use.

    The free list is the order of eviction: empty blocks first, then cached ones, least recently used first. `touch`
    takes blocks out of its middle, so it is an intrusive doubly linked list: two columns of links and no node
    objects, every move O(1). A deque would need O(n) to remove. The columns are lists, because reading one element of
    a list is several times cheaper than one of a numpy array.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InternalError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks  # empty and cached
        self.num_cached = 0
        self.num_kept = 0
        self.ref_count: list[int] = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._keepers: dict[int, int] = {}  # block → how many keep it, of those that somebody keeps
        # Circular, through a sentinel at index num_blocks: its successor is evicted next.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one holder each, or None and nothing changed when fewer are free."""
        if count > self.num_free:
            return None
        sentinel, links, hashes, ref_count = self.num_blocks, self._next, self._hashes, self.ref_count
        taken = []
        block_id = links[sentinel]
        for _ in range(count):
            taken.append(block_id)
            ref_count[block_id] = 1
            block_hash = hashes[block_id]
            if block_hash is not None:
                del self._blocks[block_hash]
                hashes[block_id] = None
                self.num_cached -= 1
            block_id = links[block_id]
        links[sentinel] = block_id  # the run of blocks before it leaves the list in one cut
        self._previous[block_id] = sentinel
        self.num_free -= count
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """One holder leaves each block. Of blocks that become free together, the first given is evicted first."""
        for block_id in block_ids:
            references = self.ref_count[block_id] - 1
            if references < 0:
                raise InternalError(f"block {block_id} is freed more often than it was taken")
            self.ref_count[block_id] = references
            if references == 0:
                self._set_aside(block_id)

    def touch(self, block_ids: Sequence[int]) -> None:
        """One more holder for each block; cached blocks leave the free list."""
        for block_id in block_ids:
            if self.ref_count[block_id] == 0:
                self._take_up(block_id)
            self.ref_count[block_id] += 1

    def keep(self, block_ids: Sequence[int]) -> None:
        """One more keeper for each block: its content stays when its last holder leaves."""
        for block_id in block_ids:
            if self.ref_count[block_id] == 0 and block_id not in self._keepers:
                self._unlink(block_id)
                self.num_kept += 1
            self._keepers[block_id] = self._keepers.get(block_id, 0) + 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One keeper leaves each block. Of blocks that become free together, the first given is evicted first."""
        for block_id in block_ids:
            keepers = self._keepers.get(block_id, 0) - 1
            if keepers < 0:
                raise InternalError(f"block {block_id} is released more often than it was kept")
            if keepers > 0:
                self._keepers[block_id] = keepers
                continue
            del self._keepers[block_id]
            if self.ref_count[block_id] == 0:
                self.num_kept -= 1
                self._append(block_id)

    def num_keepers(self, block_id: int) -> int:
        return self._keepers.get(block_id, 0)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this content."""
        return self._blocks.get(block_hash)

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hashes[block_id]

    def register_hashes(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Note that each block, in use, holds this content for good. A block that already holds it stays the one."""
        blocks, hashes, ref_count = self._blocks, self._hashes, self.ref_count
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if ref_count[block_id] == 0 or hashes[block_id] is not None:
                raise InternalError(f"block {block_id} is free or has a hash: it cannot be given one")
            if block_hash not in blocks:
                blocks[block_hash] = block_id
                hashes[block_id] = block_hash

    def drop_hash(self, block_id: int) -> None:
        """The content of a block in use must not be found any more."""
        if self.ref_count[block_id] == 0:
            raise InternalError(f"block {block_id} is free: its hash goes when it is evicted")
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._blocks[block_hash]
            self._hashes[block_id] = None

    def free_blocks(self) -> Iterator[int]:
        """In the order of eviction."""
        block_id = self._next[self.num_blocks]
        while block_id != self.num_blocks:
            yield block_id
            block_id = self._next[block_id]

    def check_invariants(self) -> None:
        """Raises `InternalError` naming what is broken. O(num_blocks)."""
        seen: set[int] = set()
        before = self.num_blocks
        for block_id in self.free_blocks():
            require(block_id not in seen, f"block {block_id} is twice in the free list")
            require(self._previous[block_id] == before, f"block {block_id} is linked wrongly")
            require(self.ref_count[block_id] == 0, f"block {block_id} is free and in use")
            require(block_id not in self._keepers, f"block {block_id} is free and kept")
            seen.add(block_id)
            before = block_id
        require(self._previous[self.num_blocks] == before, "the tail of the free list is linked wrongly")
        num_used = sum(count > 0 for count in self.ref_count)
        num_kept = sum(self.ref_count[block_id] == 0 for block_id in self._keepers)
        require(len(seen) == self.num_free, f"{len(seen)} blocks are free, not {self.num_free}")
        require(num_kept == self.num_kept, f"{num_kept} blocks are kept, not {self.num_kept}")
        require(
            num_used + num_kept + len(seen) == self.num_blocks,
            f"{num_used} used + {num_kept} kept + {len(seen)} free != {self.num_blocks}",
        )
        num_cached = sum(self._hashes[block_id] is not None for block_id in seen)
        require(num_cached == self.num_cached, f"{num_cached} blocks are cached, not {self.num_cached}")
        hashed = {h: block_id for block_id, h in enumerate(self._hashes) if h is not None}
        require(hashed == self._blocks, "blocks and their hashes disagree")

    def _set_aside(self, block_id: int) -> None:
        """Its last holder has left."""
        if self._keepers and block_id in self._keepers:
            self.num_kept += 1
        else:
            self._append(block_id)

    def _take_up(self, block_id: int) -> None:
        """Its first holder has come."""
        if self._keepers and block_id in self._keepers:
            self.num_kept -= 1
        else:
            self._unlink(block_id)

    def _append(self, block_id: int) -> None:
        """An empty block goes to the head, where nothing is lost by taking it; a cached one to the tail."""
        links, back = self._next, self._previous
        if self._hashes[block_id] is None:
            before, after = self.num_blocks, links[self.num_blocks]
        else:
            before, after = back[self.num_blocks], self.num_blocks
            self.num_cached += 1
        links[before] = back[after] = block_id
        back[block_id], links[block_id] = before, after
        self.num_free += 1

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1
        if self._hashes[block_id] is not None:
            self.num_cached -= 1
