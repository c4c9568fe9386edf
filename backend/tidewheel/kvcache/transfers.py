from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tidewheel.batch import NO_TRANSFERS, TransferArrays
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.stats import EngineStats


class IncomingBlocks(NamedTuple):
    """Blocks to copy to a new row with its first batch: from the host tier, or inside the pool."""

    keys: tuple[bytes, ...]  # of the full `blocks`
    slots: list[int]  # read
    blocks: list[int]
    copy_sources: list[int]  # at most one, copied in part
    copy_targets: list[int]


class _StepHolds(NamedTuple):
    out_slots: list[int]
    in_slots: list[int]
    sources: list[int]
    blocks: list[int]  # of rows that left


class TransferQueue:
    """Block copies of the next batch, and blocks reserved by steps in flight.

    Before a batch computes, it copies blocks to the host tier, from it, then inside the pool, so blocks copied out
    need no pin. Host slots and blocks copied inside the pool stay pinned until the step is done.
    """

    def __init__(self, pool: BlockPool, host: BlockPool, stats: EngineStats) -> None:
        self._stats = stats
        self._pool = pool
        self._host = host
        self._out_blocks: list[int] = []
        self._out_slots: list[int] = []
        self._fetched = _StepHolds([], [], [], [])
        self.arrivals: dict[int, IncomingBlocks] = {}  # by row; sources are pinned
        self._steps: defaultdict[int, _StepHolds] = defaultdict(lambda: _StepHolds([], [], [], []))

    def swap_out(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> int:
        """Queue copies to the host tier until it is full; return how many keys, from the first, have a slot."""
        for index, (block_id, key) in enumerate(zip(block_ids, keys, strict=False)):
            if self._host.lookup(key) is not None:
                continue
            slot = self._host.insert(key)
            if slot is None:
                return index
            self._out_blocks.append(block_id)
            self._out_slots.append(slot)
        return len(keys)

    def fetch(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy pinned slots to blocks in use with the next batch, and free both when its step is done."""
        self._fetched.in_slots.extend(slots)
        self._fetched.blocks.extend(block_ids)

    def cancel(self, row: int) -> None:
        arrival = self.arrivals.pop(row, None)
        if arrival is not None:
            self._host.free(arrival.slots[::-1])
            self._pool.free(arrival.copy_sources)

    def take(self, step_id: int) -> tuple[TransferArrays, dict[int, IncomingBlocks]]:
        if not self.arrivals and not self._out_blocks and not self._fetched.blocks:
            return NO_TRANSFERS, {}
        arrivals, self.arrivals = self.arrivals, {}
        fetched, self._fetched = self._fetched, _StepHolds([], [], [], [])
        in_slots = [*fetched.in_slots, *(slot for arrival in arrivals.values() for slot in arrival.slots)]
        in_blocks = [*fetched.blocks, *(block_id for arrival in arrivals.values() for block_id in arrival.blocks)]
        sources = [block_id for arrival in arrivals.values() for block_id in arrival.copy_sources]
        targets = [block_id for arrival in arrivals.values() for block_id in arrival.copy_targets]
        columns = (sources, targets, self._out_blocks, self._out_slots, in_slots, in_blocks)
        transfers = TransferArrays(*[np.array(column, dtype=np.int32) for column in columns])
        step = self._steps[step_id]
        step.out_slots.extend(self._out_slots)
        step.in_slots.extend(in_slots)
        step.sources.extend(sources)
        step.blocks.extend(fetched.blocks)
        self._stats.num_swapped_out += len(self._out_blocks)
        self._stats.num_swapped_in += len(in_blocks)
        self._out_blocks, self._out_slots = [], []
        return transfers, arrivals

    def hold(self, block_ids: list[int], step_id: int) -> None:
        self._steps[step_id].blocks.extend(block_ids)

    def done(self, step_id: int) -> None:
        step = self._steps.pop(step_id, None)
        if step is not None:
            self._unpin(step)
            self._pool.free(step.blocks)

    def abandon(self) -> None:
        """Free the blocks of failed steps in flight and drop their hashes. The caller must `forget` the rows."""
        steps = [*self._steps.values(), _StepHolds(self._out_slots, [], [], [])]
        self._steps.clear()
        self._out_blocks, self._out_slots = [], []
        for step in steps:
            for slot in step.out_slots:
                self._host.drop(self._host.hash_of(slot))
            self._unpin(step)
        blocks = [block_id for step in steps for block_id in step.blocks]
        for block_id in blocks:
            self._pool.drop(self._pool.hash_of(block_id))
        self._pool.free(blocks)

    def held_sources(self) -> list[int]:
        queued = [block_id for arrival in self.arrivals.values() for block_id in arrival.copy_sources]
        return queued + self._carried_sources()

    def held_blocks(self) -> list[int]:
        return [block_id for step in self._steps.values() for block_id in step.blocks]

    def num_returning_blocks(self) -> int:
        held = Counter(self.held_blocks() + self._carried_sources())
        return sum(self._pool.ref_count[block_id] == count for block_id, count in held.items())

    def _carried_sources(self) -> list[int]:
        return [block_id for step in self._steps.values() for block_id in step.sources]

    def _unpin(self, step: _StepHolds) -> None:
        # Evict the last block first.
        self._host.free(step.out_slots[::-1])
        self._host.free(step.in_slots[::-1])
        self._pool.free(step.sources)
