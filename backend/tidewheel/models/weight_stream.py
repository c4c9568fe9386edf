"""Threaded reading of checkpoint chunks in bounded memory, into host memory or through a pinned ring.

preadv(2) reads a shrunk file short, where a mapping would end the process (SIGBUS).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from tidewheel.errors import ConfigError
from tidewheel.models.safetensors_file import ChunkPart, FileChunk

MAX_READERS = 8  # outrun a PCIe 5.0 x16 link
SLOT_BYTES = 8 << 20
SLOTS_PER_READER = 2  # one is read while the other is copied


class ChunkSink(Protocol):
    """Destination of chunks. Chunk i may be read after chunk ``i - num_slots`` is delivered."""

    @property
    def num_slots(self) -> int: ...

    def buffers(self, index: int, chunk: FileChunk) -> Sequence[memoryview]:
        """Wait for free memory and return a chunk's buffers. Any thread."""

    def deliver(self, index: int, chunk: FileChunk) -> None:
        """Start copying a read chunk to its tensors. One thread, in order."""

    def finish(self) -> None: ...


class HostSink:
    """Sink in host memory: reads directly, or through a buffer to convert the dtype."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._read: dict[int, torch.Tensor] = {}

    def buffers(self, index: int, chunk: FileChunk) -> Sequence[memoryview]:
        if not chunk.is_converted:
            return [_bytes(part.destination) for part in chunk.parts]
        self._read[index] = memory = torch.empty(chunk.size, dtype=torch.uint8)
        return [_bytes(memory)]

    def deliver(self, index: int, chunk: FileChunk) -> None:
        if chunk.is_converted:
            memory = self._read.pop(index)
            for part in chunk.parts:
                part.destination.copy_(_source(memory, chunk, part))

    def finish(self) -> None:
        pass


class CopyEvent(Protocol):
    def synchronize(self) -> None: ...


class CopyStream(Protocol):
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return [num_bytes] uint8 that the device can read. Any thread."""

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None: ...

    def mark(self) -> CopyEvent: ...

    def finish(self) -> None: ...


class RingSink:
    def __init__(self, lane: CopyStream, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self._lane = lane
        self._slot_bytes = slot_bytes
        self._slots: list[torch.Tensor | None] = [None] * num_slots
        self._copied: list[CopyEvent | None] = [None] * num_slots

    def buffers(self, index: int, chunk: FileChunk) -> Sequence[memoryview]:
        slot = index % self.num_slots
        copied, memory = self._copied[slot], self._slots[slot]
        if copied is not None:
            copied.synchronize()
        if memory is None:  # at the first read: a small model needs few
            self._slots[slot] = memory = self._lane.allocate(self._slot_bytes)
        return [_bytes(memory[: chunk.size])]

    def deliver(self, index: int, chunk: FileChunk) -> None:
        slot = index % self.num_slots
        memory = self._slots[slot]
        assert memory is not None, "a chunk is read before it is delivered"
        for part in chunk.parts:
            self._lane.copy(_source(memory, chunk, part), part.destination)
        self._copied[slot] = self._lane.mark()

    def finish(self) -> None:
        self._lane.finish()


class CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A destination's memory may still be in use on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        with torch.cuda.device(self._device):  # the current device is thread-local
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            if source.dtype != destination.dtype:
                source = source.to(self._device, non_blocking=True)
            destination.copy_(source, non_blocking=True)

    def mark(self) -> CopyEvent:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # readers sleep, not spin
        event.record(self._stream)
        return event

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._stream.synchronize()


def _source(memory: torch.Tensor, chunk: FileChunk, part: ChunkPart) -> torch.Tensor:
    return memory[part.begin - chunk.begin : part.end - chunk.begin].view(part.dtype)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def num_readers() -> int:
    return min(MAX_READERS, len(os.sched_getaffinity(0)))


def carrier_to(device: torch.device) -> ChunkSink:
    num_slots = SLOTS_PER_READER * num_readers()
    if device.type == "cuda":
        return RingSink(CudaCopyStream(device), num_slots, SLOT_BYTES)
    return HostSink(num_slots)


def stream_chunks(chunks: Sequence[FileChunk], carrier: ChunkSink, delivered: Callable[[FileChunk], None]) -> None:
    """Read, deliver and report every chunk; leave no thread. Raise `ConfigError` naming a file that fails."""
    reading: deque[tuple[int, FileChunk, Future[None]]] = deque()

    def deliver_oldest() -> None:
        index, chunk, done = reading.popleft()
        done.result()
        carrier.deliver(index, chunk)
        delivered(chunk)

    with _opened(chunks) as descriptors, _readers() as readers:
        for index, chunk in enumerate(chunks):
            if len(reading) == carrier.num_slots:
                deliver_oldest()
            done = readers.submit(_read, descriptors[chunk.file.path], chunk, carrier, index)
            reading.append((index, chunk, done))
        while reading:
            deliver_oldest()
        carrier.finish()


@contextlib.contextmanager
def _opened(chunks: Sequence[FileChunk]) -> Iterator[dict[Path, int]]:
    with contextlib.ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        for path in dict.fromkeys(chunk.file.path for chunk in chunks):
            with _naming(path):
                descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptors[path])
            os.posix_fadvise(descriptors[path], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield descriptors


@contextlib.contextmanager
def _readers() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(num_readers(), thread_name_prefix="weights")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _read(descriptor: int, chunk: FileChunk, carrier: ChunkSink, index: int) -> None:
    buffers = carrier.buffers(index, chunk)
    start, num_read = chunk.file.data_start + chunk.begin, 0
    with _naming(chunk.file.path):
        while num_read < chunk.size:
            size = os.preadv(descriptor, _from(buffers, num_read), start + num_read)
            if size == 0:
                raise ConfigError(f"{chunk.file.path} became shorter while it was read: download it again")
            num_read += size


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _from(buffers: Sequence[memoryview], skipped: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if skipped < len(buffer):
            rest.append(buffer[skipped:])
        skipped = max(skipped - len(buffer), 0)
    return rest
