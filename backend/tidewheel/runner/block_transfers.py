"""Block copies of a batch, beside its computation."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch

from tidewheel.batch import ScheduledBatch
from tidewheel.errors import InternalError
from tidewheel.runner.host_slots import HostBlocks
from tidewheel.runner.kv_tensors import KVTensors

NUM_TIMED_BLOCKS = 8


class TransferStream(Protocol):
    def running(self) -> AbstractContextManager[object]:
        """Return a context whose work runs beside the computation, after all earlier work."""

    def join(self) -> None:
        """Make later computation wait for all copies."""

    def synchronize(self) -> None:
        """Make the host wait for all copies."""


class InlineTransferStream:
    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CudaTransferStream:
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


def side_of(device: torch.device) -> TransferStream:
    return CudaTransferStream(device) if device.type == "cuda" else InlineTransferStream()


class BlockTransfers:
    """Copies out of the cache, then into it, then inside it, before a batch computes.

    The next batch waits for copies out; this one does only if it has copies in, or rewrites blocks that go out.
    """

    def __init__(self, kv: KVTensors, host: HostBlocks | None, side: TransferStream | None = None) -> None:
        self._kv = kv
        self._host = host
        self._side = side or side_of(kv.device)
        self._is_writing_out = False

    def start(self, batch: ScheduledBatch) -> None:
        """Raise `InternalError` if the device refuses."""
        try:
            self._start(batch)
        except RuntimeError as error:  # a retried step must not copy again: the pool may have changed
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
        if len(batch.swap_in_blocks) or _rewrites_swapped_out(batch):
            self._side.join()
        else:
            self._is_writing_out = True

    def seconds_per_block(self) -> float | None:
        """Measure a copy one way; return None without a host tier. Overwrites blocks: call before the first batch."""
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


def _rewrites_swapped_out(batch: ScheduledBatch) -> bool:
    taken = np.concatenate((batch.block_ids, batch.copy_targets))
    return bool(np.isin(batch.swap_out_blocks, taken).any())
