"""Host tier memory, and its copies to and from the KV cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tidewheel.batch import Int32Array
from tidewheel.runner.kv_tensors import MIB, KVTensors, index_on

# torch rounds pinned memory up to a power of two: one large tensor could take twice its size.
SLAB_BYTES = 1024 * MIB
STAGING_BYTES = 64 * MIB


def num_staged_blocks(block_bytes: int, num_slots: int) -> int:
    """Return the blocks in the device's staging buffer."""
    return min(max(1, STAGING_BYTES // block_bytes), num_slots)


class HostBlocks:
    """Host slots, pinned on CUDA, of one block of all layers each.

    A block's keys and values of each layer are separate in the cache and contiguous in a slot. A block is gathered
    into a staging buffer on the device and crosses the bus in one piece. CUDA copies are queued without waiting and
    must all use the same current stream.
    """

    def __init__(self, kv: KVTensors, num_slots: int) -> None:
        """Raise `RuntimeError` if the memory cannot be allocated."""
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

    @property
    def num_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def slot(self, index: int) -> torch.Tensor:
        """Return [2 * num_layers, block_size, num_kv_heads, head_dim]."""
        return self._slabs[index // self._slab_slots][index % self._slab_slots]

    def write_out(self, block_ids: Int32Array, slots: Int32Array) -> None:
        """Copy cache block `block_ids[i]` to slot `slots[i]`."""
        for index, chunk in self._chunks(block_ids, slots):
            staged = self._staging[: len(chunk)]
            torch.index_select(self._blocks, 0, index, out=staged)
            for row, slot in enumerate(chunk):
                self.slot(slot).copy_(staged[row], non_blocking=True)

    def read_in(self, slots: Int32Array, block_ids: Int32Array) -> None:
        """Copy slot `slots[i]` to cache block `block_ids[i]`."""
        for index, chunk in self._chunks(block_ids, slots):
            staged = self._staging[: len(chunk)]
            for row, slot in enumerate(chunk):
                staged[row].copy_(self.slot(slot), non_blocking=True)
            self._blocks.index_copy_(0, index, staged)

    def _chunks(self, block_ids: Int32Array, slots: Int32Array) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Yield chunks that fit the staging buffer: block ids on the device, and slots."""
        size = len(self._staging)
        for first in range(0, len(slots), size):
            index = index_on(self._staging.device, block_ids[first : first + size])
            yield index, slots[first : first + size].tolist()
