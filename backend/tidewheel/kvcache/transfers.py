from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.host_tier import HostTier
from tidewheel.kvcache.invariants import require
from tidewheel.stats import EngineStats


class Transfers(NamedTuple):
    """Columns of `ScheduledBatch`, by name."""

    copy_sources: Int32Array
    copy_targets: Int32Array
    swap_out_blocks: Int32Array
    swap_out_slots: Int32Array
    swap_in_slots: Int32Array
    swap_in_blocks: Int32Array


NO_TRANSFERS = Transfers(*[np.empty(0, dtype=np.int32)] * 6)


class Arrival(NamedTuple):
    """Content that a new row receives with its first batch."""

    keys: tuple[bytes, ...]  # contents of the full `blocks`
    slots: list[int]  # to read
    blocks: list[int]  # to fill
    copy_sources: list[int]  # at most one block, copied in part
    copy_targets: list[int]


class _Carried(NamedTuple):
    """Pinned until the step is done."""

    out_slots: list[int]
    in_slots: list[int]
    sources: list[int]


class TransferQueue:
    """Copies that the next batch performs: between pool and host tier, and within the pool.

    Sources and targets are pinned until the batch is done. It performs its transfers before it computes: out, in,
    then copies. Therefore

    * blocks written out need no pin: new content comes later in the batch;
    * blocks copied from are held, so that no swap of the batch overwrites them;
    * slots of both directions are pinned, so that no batch writes a slot that it reads.
    """

    def __init__(self, pool: BlockPool, host: HostTier, stats: EngineStats) -> None:
        self._stats = stats
        self._pool = pool
        self._host = host
        self._out_blocks: list[int] = []
        self._out_slots: list[int] = []
        self._arrivals: dict[int, Arrival] = {}
        self._carried: dict[int, _Carried] = {}  # by step

    def swap_out(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> int:
        """Queue copies until the host tier is full. Return how many leading keys will be there."""
        for index, (block_id, key) in enumerate(zip(block_ids, keys, strict=False)):
            if self._host.lookup(key) is not None:
                continue
            slot = self._host.insert(key)
            if slot is None:
                return index
            self._out_blocks.append(block_id)
            self._out_slots.append(slot)
        return len(keys)

    def pin(self, slots: Sequence[int], copy_sources: Sequence[int]) -> None:
        """Protect the sources of an arrival. Call before taking its blocks, which may evict them."""
        self._host.pin(slots)
        self._pool.touch(copy_sources)

    def arrive(self, row: int, arrival: Arrival) -> None:
        """Queue an arrival whose sources are pinned."""
        self._arrivals[row] = arrival

    def is_arriving(self, row: int) -> bool:
        return row in self._arrivals

    def cancel(self, row: int) -> None:
        """Drop the transfers of a row that leaves early."""
        arrival = self._arrivals.pop(row, None)
        if arrival is not None:
            self._host.unpin(arrival.slots[::-1])
            self._pool.free(arrival.copy_sources)

    def take(self, step_id: int) -> tuple[Transfers, dict[int, Arrival]]:
        """Assign queued transfers to this step; return them and arrivals by row."""
        if not self._arrivals and not self._out_blocks:
            return NO_TRANSFERS, {}
        arrivals, self._arrivals = self._arrivals, {}
        in_slots = [slot for arrival in arrivals.values() for slot in arrival.slots]
        in_blocks = [block_id for arrival in arrivals.values() for block_id in arrival.blocks]
        sources = [block_id for arrival in arrivals.values() for block_id in arrival.copy_sources]
        targets = [block_id for arrival in arrivals.values() for block_id in arrival.copy_targets]
        columns = (sources, targets, self._out_blocks, self._out_slots, in_slots, in_blocks)
        transfers = Transfers(*[np.array(column, dtype=np.int32) for column in columns])
        self._carried[step_id] = _Carried(self._out_slots, in_slots, sources)
        self._stats.num_swapped_out += len(self._out_blocks)
        self._stats.num_swapped_in += len(in_blocks)
        self._out_blocks, self._out_slots = [], []
        return transfers, arrivals

    def done(self, step_id: int) -> None:
        carried = self._carried.pop(step_id, None)
        if carried is not None:
            self._unpin(carried)

    def abandon(self) -> None:
        """Forget unfinished writes to the host tier, which may never have happened."""
        carried = [*self._carried.values(), _Carried(self._out_slots, [], [])]
        self._carried.clear()
        self._out_blocks, self._out_slots = [], []
        for step in carried:
            for slot in step.out_slots:
                self._host.drop(self._host.key_of(slot))
            self._unpin(step)

    def check_invariants(self) -> None:
        require(len(self._out_blocks) == len(self._out_slots), "blocks to write out have no slots")
        for row, arrival in self._arrivals.items():
            require(len(arrival.slots) == len(arrival.blocks), f"row {row} reads slots into no blocks")

    def held_sources(self) -> list[int]:
        """Return the copy sources, once per copy."""
        queued = [block_id for arrival in self._arrivals.values() for block_id in arrival.copy_sources]
        return queued + self.carried_sources()

    def carried_sources(self) -> list[int]:
        return [block_id for step in self._carried.values() for block_id in step.sources]

    def _unpin(self, carried: _Carried) -> None:
        # Evict the last block first: content is useless without its predecessors.
        self._host.unpin(carried.out_slots[::-1])
        self._host.unpin(carried.in_slots[::-1])
        self._pool.free(carried.sources)
