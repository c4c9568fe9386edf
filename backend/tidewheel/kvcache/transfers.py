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
        self._next = _StepHolds([], [], [], [])  # of the next batch
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
            self._next.out_slots.append(slot)
        return len(keys)

    def fetch(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy pinned slots to blocks in use with the next batch, and free both when its step is done."""
        self._next.in_slots.extend(slots)
        self._next.blocks.extend(block_ids)

    def cancel(self, row: int) -> None:
        arrival = self.arrivals.pop(row, None)
        if arrival is not None:
            self._host.free(arrival.slots[::-1])
            self._pool.free(arrival.copy_sources)

    def take(self, step_id: int) -> tuple[TransferArrays, dict[int, IncomingBlocks]]:
        if not self.arrivals and not self._out_blocks and not self._next.blocks:
            return NO_TRANSFERS, {}
        step = self._steps[step_id] = self._next
        arrivals, in_blocks, targets = self.arrivals, [*step.blocks], list[int]()
        for arrival in arrivals.values():
            step.in_slots.extend(arrival.slots)
            in_blocks.extend(arrival.blocks)
            step.sources.extend(arrival.copy_sources)
            targets.extend(arrival.copy_targets)
        columns = (step.sources, targets, self._out_blocks, step.out_slots, step.in_slots, in_blocks)
        transfers = TransferArrays(*[np.array(column, dtype=np.int32) for column in columns])
        self._stats.num_swapped_out += len(self._out_blocks)
        self._stats.num_swapped_in += len(in_blocks)
        self.arrivals, self._out_blocks, self._next = {}, [], _StepHolds([], [], [], [])
        return transfers, arrivals

    def hold(self, block_ids: list[int], step_id: int) -> None:
        self._steps[step_id].blocks.extend(block_ids)

    def done(self, step_id: int) -> None:
        step = self._steps.pop(step_id, None)
        if step is not None:
            self._release(step)

    def abandon(self) -> None:
        """Free the blocks of failed steps in flight and drop their hashes. The caller must `forget` the rows."""
        steps = [*self._steps.values(), self._next]
        self._steps.clear()
        self._out_blocks, self._next = [], _StepHolds([], [], [], [])
        for step in steps:
            for slot in step.out_slots:
                self._host.drop(self._host.hash_of(slot))
            for block_id in step.blocks:
                self._pool.drop(self._pool.hash_of(block_id))
            self._release(step)

    def num_returning_blocks(self) -> int:
        held = Counter([block_id for step in self._steps.values() for block_id in (*step.blocks, *step.sources)])
        return sum(self._pool.ref_count[block_id] == count for block_id, count in held.items())

    def _release(self, step: _StepHolds) -> None:
        # Evict the last block first.
        self._host.free(step.out_slots[::-1])
        self._host.free(step.in_slots[::-1])
        self._pool.free(step.sources)
        self._pool.free(step.blocks)
