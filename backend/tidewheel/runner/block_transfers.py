"""Carries out the transfers of a batch beside the computation, and waits for them no longer than it must."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch

from tidewheel.batch import ScheduledBatch
from tidewheel.errors import InternalError
from tidewheel.runner.host_blocks import HostBlocks
from tidewheel.runner.kv_tensors import KVTensors

NUM_TIMED_BLOCKS = 8


class Side(Protocol):
    """Where copies run while the device computes."""

    def running(self) -> AbstractContextManager[object]:
        """What is queued inside runs beside the computation, but after all that was queued before."""

    def join(self) -> None:
        """What the computation is given from now on runs after all copies."""

    def synchronize(self) -> None:
        """Waits, on the host, until all copies are done."""


class SameThread:
    """On a CPU a copy is done when it returns."""

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class SideStream:
    """A CUDA stream beside the current one; the two wait for each other by events, the host for neither."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def running(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


def side_of(device: torch.device) -> Side:
    return SideStream(device) if device.type == "cuda" else SameThread()


class BlockTransfers:
    """Out of the cache, into it, then copies inside it, before the batch computes anything.

    The computation waits for copies into the cache. For copies out of it, it waits when the batch gives one of their
    blocks a new content, else not before the next batch does.
    """

    def __init__(self, kv: KVTensors, host: HostBlocks | None, side: Side | None = None) -> None:
        self._kv = kv
        self._host = host
        self._side = side or side_of(kv.device)
        self._is_writing_out = False

    def start(self, batch: ScheduledBatch) -> None:
        """To be called before anything of the batch is computed. Raises `InternalError` when the device refuses."""
        try:
            self._start(batch)
        except RuntimeError as error:  # a step that is run again must not repeat them: the pool may have moved on
            raise InternalError(f"step {batch.step_id}: blocks could not be copied: {error}") from error

    def _start(self, batch: ScheduledBatch) -> None:
        if self._is_writing_out:
            self._side.join()
            self._is_writing_out = False
        if len(batch.swap_out_blocks) or len(batch.swap_in_blocks):
            self._swap(batch)
        self._kv.copy(batch.copy_sources, batch.copy_targets)

    def _swap(self, batch: ScheduledBatch) -> None:
        if self._host is None:
            raise InternalError(f"step {batch.step_id} swaps blocks, and there is no host tier")
        with self._side.running():
            self._host.write_out(batch.swap_out_blocks, batch.swap_out_slots)
            self._host.read_in(batch.swap_in_slots, batch.swap_in_blocks)
        if len(batch.swap_in_blocks) or _gives_away(batch):
            self._side.join()
        else:
            self._is_writing_out = True

    def seconds_per_block(self) -> float | None:
        """Of one copy in one direction, measured; None without a host tier. Only before the first batch: it writes
        to the cache."""
        if self._host is None:
            return None
        count = min(NUM_TIMED_BLOCKS, self._host.num_slots, len(self._kv.blocks))
        ids = np.arange(count, dtype=np.int32)
        self._round_trip(self._host, ids[:1])
        started = time.perf_counter()
        self._round_trip(self._host, ids)
        return (time.perf_counter() - started) / (2 * count)

    def _round_trip(self, host: HostBlocks, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        with self._side.running():
            host.write_out(ids, ids)
            host.read_in(ids, ids)
        self._side.synchronize()


def _gives_away(batch: ScheduledBatch) -> bool:
    """Whether a block that is written out gets a new content in this batch already."""
    taken = np.concatenate((batch.block_ids, batch.copy_targets))
    return bool(np.isin(batch.swap_out_blocks, taken).any())
