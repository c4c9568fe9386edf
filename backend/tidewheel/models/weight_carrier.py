"""How bytes of a checkpoint get from a file into tensors: straight into host memory, or through a pinned ring.

Files are read with preadv(2) and not mapped, because a mapped file that shrinks ends the process (SIGBUS), where a
read comes back short. From a warm page cache a mapping takes a quarter less processor time
(`benchmarks/load_speed.py`), but a few readers outrun the bus either way; from a cold one it took as long as the
reads, or up to six times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tidewheel.models.weight_plan import Chunk, Part


class Carrier(Protocol):
    """Chunk i may be read once chunk ``i - num_slots`` is delivered; delivery is in order."""

    @property
    def num_slots(self) -> int: ...

    def buffers(self, index: int, chunk: Chunk) -> Sequence[memoryview]:
        """Where the bytes of a chunk are to be read to, in order; waits until that is free. Any thread."""

    def deliver(self, index: int, chunk: Chunk) -> None:
        """The bytes are there: brings them to their destinations, or begins to. One thread."""

    def finish(self) -> None:
        """Waits until everything has arrived."""


class HostCarrier:
    """Destinations in host memory: read straight into them, or through a buffer where the dtype changes."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._read: dict[int, torch.Tensor] = {}

    def buffers(self, index: int, chunk: Chunk) -> Sequence[memoryview]:
        if not chunk.is_converted:
            return [_bytes(part.destination) for part in chunk.parts]
        self._read[index] = memory = torch.empty(chunk.size, dtype=torch.uint8)
        return [_bytes(memory)]

    def deliver(self, index: int, chunk: Chunk) -> None:
        if chunk.is_converted:
            memory = self._read.pop(index)
            for part in chunk.parts:
                part.destination.copy_(_source(memory, chunk, part))

    def finish(self) -> None:
        pass


class Event(Protocol):
    def synchronize(self) -> None:
        """Returns once the device has come to it."""


class Lane(Protocol):
    """A queue of copies to a device, and the host memory that it reads from."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 that the device can read. Any thread."""

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Queues a copy of a flat tensor; the device converts it to the dtype of its destination."""

    def mark(self) -> Event:
        """An event behind all that was queued so far."""

    def finish(self) -> None:
        """Waits for all that was queued; what the computation does from now on comes after it."""


class RingCarrier:
    """Destinations on a device: every chunk is read into a slot of pinned memory and copied from there.

    A slot is written again only when the device is past the copies out of it. Host memory is `num_slots` slots,
    whatever the size of the model.
    """

    def __init__(self, lane: Lane, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self._lane = lane
        self._slot_bytes = slot_bytes
        self._slots: list[torch.Tensor | None] = [None] * num_slots
        self._copied: list[Event | None] = [None] * num_slots

    def buffers(self, index: int, chunk: Chunk) -> Sequence[memoryview]:
        slot = index % self.num_slots
        copied, memory = self._copied[slot], self._slots[slot]
        if copied is not None:
            copied.synchronize()
        if memory is None:  # made by whoever reads first: a small model pays for few
            self._slots[slot] = memory = self._lane.allocate(self._slot_bytes)
        return [_bytes(memory[: chunk.size])]

    def deliver(self, index: int, chunk: Chunk) -> None:
        slot = index % self.num_slots
        memory = self._slots[slot]
        assert memory is not None, "a chunk is read before it is delivered"
        for part in chunk.parts:
            self._lane.copy(_source(memory, chunk, part), part.destination)
        self._copied[slot] = self._lane.mark()

    def finish(self) -> None:
        self._lane.finish()


class CudaLane:
    """A CUDA stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The memory of a destination may have been in use, and freed, on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        with torch.cuda.device(self._device):  # which device is current is a matter of each thread
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            if source.dtype != destination.dtype:
                source = source.to(self._device, non_blocking=True)
            destination.copy_(source, non_blocking=True)

    def mark(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # readers sleep, not spin
        event.record(self._stream)
        return event

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._stream.synchronize()


def _source(memory: torch.Tensor, chunk: Chunk, part: Part) -> torch.Tensor:
    return memory[part.begin - chunk.begin : part.end - chunk.begin].view(part.dtype)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
