from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from tidewheel.errors import InternalError


class BlockPool:
    """Blocks ``0 … num_blocks - 1``, each in one of four states:

        in use    ``ref_count > 0``; once full and computed it has a hash, is never written again and may be shared
        kept      ``ref_count == 0``, but after `keep`: not evicted until `release`
        cached    ``ref_count == 0`` with a hash: `lookup` finds it, `allocate` may evict it
        empty     ``ref_count == 0`` without a hash

    The host tier has its own pool, with blocks in use until copied. Empty blocks are taken first, then cached ones
    are evicted, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_kept = 0
        self.ref_count: list[int] = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._keepers: dict[int, int] = {}
        self._empty = list(reversed(range(num_blocks)))  # stack
        self._cached: OrderedDict[int, bytes] = OrderedDict()  # hashes, least recently used first

    @property
    def num_free(self) -> int:
        """Return the number of empty and cached blocks."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """Take free blocks, evicting cached contents; None, without effect, if there are too few."""
        if count > self.num_free:
            return None
        empty, cached, hashes, ref_count = self._empty, self._cached, self._hashes, self.ref_count
        taken = []
        for _ in range(count):
            if empty:
                block_id = empty.pop()
            else:
                block_id, block_hash = cached.popitem(last=False)
                del self._blocks[block_hash]
                hashes[block_id] = None
            taken.append(block_id)
            ref_count[block_id] = 1
        return taken

    def insert(self, block_hash: bytes) -> int | None:
        """Take a block and give it a hash; None if no block is free."""
        if block_hash in self._blocks:
            raise InternalError("a content would be in two blocks")
        taken = self.allocate(1)
        if taken is None:
            return None
        self.register_hashes(taken, (block_hash,))
        return taken[0]

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block; the first freed is evicted first."""
        ref_count, keepers = self.ref_count, self._keepers
        for block_id in block_ids:
            references = ref_count[block_id] - 1
            if references < 0:
                raise InternalError(f"block {block_id} is freed more often than it was taken")
            ref_count[block_id] = references
            if references:
                continue
            if keepers and block_id in keepers:
                self.num_kept += 1
            else:
                self._append(block_id)

    def touch(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.ref_count[block_id] += 1
            if self.ref_count[block_id] > 1:
                continue
            if block_id in self._keepers:
                self.num_kept -= 1
            else:
                self._unlink(block_id)

    def keep(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if self.ref_count[block_id] == 0 and block_id not in self._keepers:
                self._unlink(block_id)
                self.num_kept += 1
            self._keepers[block_id] = self._keepers.get(block_id, 0) + 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one keeper of each block; the first released is evicted first."""
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

    def lookup(self, block_hash: bytes) -> int | None:
        return self._blocks.get(block_hash)

    def lookup_prefix(self, block_hashes: Iterable[bytes]) -> tuple[int, ...]:
        block_ids: list[int] = []
        with suppress(KeyError):  # `extend` keeps the prefix; a Python loop takes three times as long
            block_ids.extend(map(self._blocks.__getitem__, block_hashes))
        return tuple(block_ids)

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hashes[block_id]

    def register_hashes(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Make full blocks findable by hash; of equal contents, only the first."""
        blocks, hashes, ref_count = self._blocks, self._hashes, self.ref_count
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if ref_count[block_id] == 0 or hashes[block_id] is not None:
                raise InternalError(f"block {block_id} is free or has a hash: it cannot be given one")
            if block_hash not in blocks:
                blocks[block_hash] = block_id
                hashes[block_id] = block_hash

    def drop(self, block_hash: bytes | None) -> None:
        """Remove a hash; its block, if free, is taken next."""
        if block_hash is None or block_hash not in self._blocks:
            return
        block_id = self._blocks.pop(block_hash)
        self._hashes[block_id] = None
        if block_id in self._cached:
            del self._cached[block_id]
            self._empty.append(block_id)

    def _append(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is None:
            self._empty.append(block_id)
        else:
            self._cached[block_id] = block_hash

    def _unlink(self, block_id: int) -> None:
        if self._cached.pop(block_id, None) is None:
            self._empty.remove(block_id)  # rare: a row takes over a session's tail
