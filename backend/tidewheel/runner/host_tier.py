import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from tidewheel.batch import Int32Array, ScheduledBatch
from tidewheel.errors import ConfigError, InternalError
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors, index_on
from tidewheel.settings import GIB, MIB

# torch rounds pinned memory up to a power of two.
SLAB_BYTES = 1024 * MIB
STAGING_BYTES = 64 * MIB


def num_staged_blocks(block_bytes: int, num_slots: int) -> int:
    return min(max(1, STAGING_BYTES // block_bytes), num_slots)


class HostBlocks:
    """Host memory (pinned on CUDA) with a block of all layers per slot, copied through a buffer on the device."""

    def __init__(self, kv: KVTensors, num_slots: int) -> None:
        """Raise `RuntimeError` if there is too little memory."""
        self.num_slots = num_slots
        self._blocks = kv.blocks
        shape, dtype = self._blocks.shape[1:], self._blocks.dtype
        slot_bytes = shape.numel() * dtype.itemsize
        num_staged = num_staged_blocks(slot_bytes, num_slots)
        pinned = kv.device.type == "cuda"
        self._slab_slots = max(1, SLAB_BYTES // slot_bytes)
        self._slabs = [
            torch.empty(min(self._slab_slots, num_slots - first), *shape, dtype=dtype, pin_memory=pinned)
            for first in range(0, num_slots, self._slab_slots)
        ]
        self._staging = torch.empty(num_staged, *shape, dtype=dtype, device=kv.device)

    def slot(self, index: int) -> torch.Tensor:
        """Return keys and values [2 * num_layers, block_size, num_kv_heads, head_dim]."""
        return self._slabs[index // self._slab_slots][index % self._slab_slots]

    def write_out(self, block_ids: Int32Array, slots: Int32Array) -> None:
        for index, chunk in self._chunks(block_ids, slots):
            staged = self._staging[: len(chunk)]
            torch.index_select(self._blocks, 0, index, out=staged)
            for row, slot in enumerate(chunk):
                self.slot(slot).copy_(staged[row], non_blocking=True)

    def read_in(self, slots: Int32Array, block_ids: Int32Array) -> None:
        for index, chunk in self._chunks(block_ids, slots):
            staged = self._staging[: len(chunk)]
            for row, slot in enumerate(chunk):
                staged[row].copy_(self.slot(slot), non_blocking=True)
            self._blocks.index_copy_(0, index, staged)

    def _chunks(self, block_ids: Int32Array, slots: Int32Array) -> Iterator[tuple[torch.Tensor, list[int]]]:
        size = len(self._staging)  # chunks reuse the buffer: the stream runs their copies in order
        for first in range(0, len(slots), size):
            index = index_on(self._staging.device, block_ids[first : first + size])
            yield index, slots[first : first + size].tolist()


def decide_num_host_blocks(swap_space: float, layout: CacheLayout, available_bytes: int) -> int:
    """Return the blocks in `swap_space` GiB. Raise `ConfigError` if under one block or over free memory."""
    if swap_space == 0.0:
        return 0
    num_bytes = int(swap_space * GIB)
    if num_bytes > available_bytes:
        raise ConfigError(
            f"swap_space is {swap_space:g} GiB, but {available_bytes / GIB:.1f} GiB of host memory are available: "
            "lower it"
        )
    num_blocks = num_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"swap_space is {swap_space:g} GiB, which does not hold one block of {layout.block_bytes / MIB:.1f} MiB: "
            "raise it, or set it to 0"
        )
    return num_blocks


NUM_TIMED_BLOCKS = 8


class TransferStream:
    """CUDA stream for block copies beside the computation; on a CPU they run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def running(self) -> AbstractContextManager[object]:
        """Return a context for copies after all earlier work."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Make later computation wait for all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class BlockTransfers:
    """Block copies before a batch computes: out of the cache, into it, then inside it.

    The batch waits for its copies if it copies in, or rewrites blocks being copied out; else the next batch waits.
    """

    def __init__(self, kv: KVTensors, host: HostBlocks | None = None, stream: TransferStream | None = None) -> None:
        self.kv = kv
        self._host = host
        self._transfer_stream = stream or TransferStream(kv.device)
        self._is_writing_out = False

    def start(self, batch: ScheduledBatch) -> None:
        """Queue copies. Raise `InternalError` if the device refuses."""
        try:
            if self._is_writing_out:
                self._transfer_stream.join()
                self._is_writing_out = False
            moves = batch.transfers
            if len(moves.swap_out_blocks) or len(moves.swap_in_blocks):
                self._swap(batch)
            if len(moves.copy_sources):
                self.kv.copy(moves.copy_sources, moves.copy_targets)
        except RuntimeError as error:  # not retried: the pool may have changed
            raise InternalError(f"step {batch.step_id}: blocks could not be copied: {error}") from error

    def _swap(self, batch: ScheduledBatch) -> None:
        if self._host is None:
            raise InternalError(f"step {batch.step_id} swaps blocks, and there is no host tier")
        moves = batch.transfers
        with self._transfer_stream.running():
            self._host.write_out(moves.swap_out_blocks, moves.swap_out_slots)
            self._host.read_in(moves.swap_in_slots, moves.swap_in_blocks)
        rewritten = np.concatenate((batch.block_ids, moves.copy_targets))
        if len(moves.swap_in_blocks) or np.isin(moves.swap_out_blocks, rewritten).any():
            self._transfer_stream.join()
        else:
            self._is_writing_out = True

    def seconds_per_block(self) -> float | None:
        """Return the time of a copy; None without a host tier. Overwrites blocks: call before the first batch."""
        if self._host is None:
            return None
        count = min(NUM_TIMED_BLOCKS, self._host.num_slots, len(self.kv.blocks))
        ids = np.arange(count, dtype=np.int32)
        self._round_trip(self._host, ids[:1])
        started = time.perf_counter()
        self._round_trip(self._host, ids)
        return (time.perf_counter() - started) / (2 * count)

    def _round_trip(self, host: HostBlocks, ids: Int32Array) -> None:
        with self._transfer_stream.running():
            host.write_out(ids, ids)
            host.read_in(ids, ids)
        self._transfer_stream.synchronize()
