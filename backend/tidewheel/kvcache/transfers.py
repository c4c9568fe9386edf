"""Copies of blocks that the next batch carries: between pool and host tier, and inside the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.host_tier import HostTier
from tidewheel.kvcache.invariants import require
from tidewheel.stats import EngineStats


class Transfers(NamedTuple):
    """Columns of `ScheduledBatch`, under their names there."""

    copy_sources: Int32Array
    copy_targets: Int32Array
    swap_out_blocks: Int32Array
    swap_out_slots: Int32Array
    swap_in_slots: Int32Array
    swap_in_blocks: Int32Array


_NONE = np.empty(0, dtype=np.int32)
NO_TRANSFERS = Transfers(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a row that has just entered waits for."""

    keys: tuple[bytes, ...] = ()  # contents of the full blocks among the next
    slots: tuple[int, ...] = ()  # host slots, to be read into
    blocks: tuple[int, ...] = ()  # these blocks of the row
    copy_source: int = -1  # a block whose beginning is copied; -1: none
    copy_target: int = -1


@dataclass(slots=True)
class _Carried:
    """Pinned until the step is done."""

    out_slots: list[int] = field(default_factory=list)
    in_slots: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)


class TransferQueue:
    """Queues transfers for the next batch, and pins what they read and write until that batch is done.

    A batch carries out its transfers before it writes anything: out, in, then copies. Therefore

    * a block that is written out needs no pin: it may be given away at once, for what comes to be in it comes later;
    * a block that is copied from is held, so that no swap of the same batch overwrites it;
    * the slots of both directions are pinned: a slot that is being read is not written by the same batch.

    What a row waits for is queued under the row, and goes with it when it leaves before its batch.
    """

    def __init__(self, pool: BlockPool, host: HostTier, stats: EngineStats) -> None:
        self._stats = stats
        self._pool = pool
        self._host = host
        self._out_blocks: list[int] = []
        self._out_slots: list[int] = []
        self._arrivals: dict[int, Arrival] = {}
        self._carried: dict[int, _Carried] = {}  # by step

    def swap_out(self, block_id: int, key: bytes) -> bool:
        """Queues a copy of the block to the host tier, unless it is there; False when there is no room."""
        if self._host.lookup(key) is not None:
            return True
        slot = self._host.insert(key)
        if slot is None:
            return False
        self._out_blocks.append(block_id)
        self._out_slots.append(slot)
        return True

    def pin(self, slots: Sequence[int], copy_source: int) -> None:
        """To be called before blocks are taken for a row: taking them may evict what it waits for."""
        self._host.pin(slots)
        if copy_source >= 0:
            self._pool.touch([copy_source])

    def arrive(self, row: int, arrival: Arrival) -> None:
        """Queues what `pin` has pinned."""
        self._arrivals[row] = arrival

    def is_arriving(self, row: int) -> bool:
        return row in self._arrivals

    def cancel(self, row: int) -> None:
        """The row leaves before its batch: its transfers are not carried out."""
        arrival = self._arrivals.pop(row, None)
        if arrival is not None:
            self._host.unpin(arrival.slots[::-1])
            if arrival.copy_source >= 0:
                self._pool.free([arrival.copy_source])

    def take(self, step_id: int) -> tuple[Transfers, dict[int, Arrival]]:
        """All that is queued, now in the hands of this step, and the rows that get their content by it."""
        if not self._arrivals and not self._out_blocks:
            return NO_TRANSFERS, {}
        arrivals, self._arrivals = self._arrivals, {}
        copies = [arrival for arrival in arrivals.values() if arrival.copy_source >= 0]
        in_slots = [slot for arrival in arrivals.values() for slot in arrival.slots]
        in_blocks = [block_id for arrival in arrivals.values() for block_id in arrival.blocks]
        sources = [arrival.copy_source for arrival in copies]
        targets = [arrival.copy_target for arrival in copies]
        transfers = Transfers(*map(_ids, (sources, targets, self._out_blocks, self._out_slots, in_slots, in_blocks)))
        self._carried[step_id] = _Carried(self._out_slots, in_slots, sources)
        self._stats.num_swapped_out += len(self._out_blocks)
        self._stats.num_swapped_in += len(in_blocks)
        self._out_blocks, self._out_slots = [], []
        return transfers, arrivals

    def done(self, step_id: int) -> None:
        """The step has carried out what it took."""
        carried = self._carried.pop(step_id, None) if self._carried else None
        if carried is not None:
            self._unpin(carried)

    def abandon(self) -> None:
        """What is queued or in flight may never have been carried out: what was to be written out is not there."""
        carried = [*self._carried.values(), _Carried(out_slots=self._out_slots)]
        self._carried.clear()
        self._out_blocks, self._out_slots = [], []
        for step in carried:
            for slot in step.out_slots:
                key = self._host.key_of(slot)
                if key is not None:
                    self._host.drop(key)
            self._unpin(step)

    def check_invariants(self) -> None:
        """Raises `InternalError` naming what is broken."""
        require(len(self._out_blocks) == len(self._out_slots), "blocks to write out have no slots")
        for row, arrival in self._arrivals.items():
            require(len(arrival.slots) == len(arrival.blocks), f"row {row} reads slots into no blocks")

    def held_sources(self) -> list[int]:
        """Blocks held because they are copied from, once for each time."""
        queued = [arrival.copy_source for arrival in self._arrivals.values() if arrival.copy_source >= 0]
        return [*queued, *(block_id for step in self._carried.values() for block_id in step.sources)]

    def carried_sources(self) -> list[int]:
        """Those of them that a batch in flight holds."""
        return [block_id for step in self._carried.values() for block_id in step.sources]

    def _unpin(self, carried: _Carried) -> None:
        # Last block first: a content is of use only together with those before it.
        self._host.unpin(carried.out_slots[::-1])
        self._host.unpin(carried.in_slots[::-1])
        self._pool.free(carried.sources)


def _ids(values: Sequence[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)
