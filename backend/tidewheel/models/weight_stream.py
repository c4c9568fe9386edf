"""Tensors in files, read by threads into host memory, or through a pinned ring.

If a file shrinks, preadv(2) returns fewer bytes; a memory mapping would end the process (SIGBUS).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tidewheel.errors import ConfigError
from tidewheel.models.linear import GroupFormat

MAX_READERS = 8  # outrun a PCIe 5.0 x16 link
SLOT_BYTES = 8 << 20
SLOTS_PER_READER = 2  # one is read while the other is copied

BytesRead = Callable[[int], None]  # called with the bytes read since the last call


class StoredTensor(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    kind: torch.dtype | GroupFormat
    begin: int = 0  # byte of the file

    @property
    def num_bytes(self) -> int:
        size = math.prod(self.shape)
        return self.kind.num_bytes(size) if isinstance(self.kind, GroupFormat) else size * self.kind.itemsize


class FileChunk(NamedTuple):
    file: Path
    begin: int  # byte of the file
    dtype: torch.dtype  # in the file
    destination: torch.Tensor  # flat view [n]

    @property
    def size(self) -> int:
        return self.destination.numel() * self.dtype.itemsize

    @property
    def is_converted(self) -> bool:
        return self.dtype != self.destination.dtype


def plan_chunks(
    tensors: Mapping[str, StoredTensor], destinations: Mapping[str, torch.Tensor], max_bytes: int
) -> list[FileChunk]:
    """Return chunks of the destinations' tensors, in the order of the files."""
    chunks: list[FileChunk] = []
    for name in sorted(destinations, key=lambda name: (tensors[name].file, tensors[name].begin)):
        file, _, dtype, begin = tensors[name]
        assert isinstance(dtype, torch.dtype)
        for piece in torch.split(destinations[name].view(-1), max_bytes // dtype.itemsize):
            if piece.numel():
                chunks.append(FileChunk(file, begin, dtype, piece))
                begin += chunks[-1].size
    return chunks


class HostSink:
    """Host memory: read directly, or through a buffer to convert the dtype."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._read: dict[int, torch.Tensor] = {}

    def buffer(self, index: int, chunk: FileChunk) -> torch.Tensor:
        if not chunk.is_converted:
            return chunk.destination.view(torch.uint8)
        self._read[index] = memory = torch.empty(chunk.size, dtype=torch.uint8)
        return memory

    def deliver(self, index: int, chunk: FileChunk) -> None:
        if chunk.is_converted:
            chunk.destination.copy_(self._read.pop(index).view(chunk.dtype))

    def finish(self) -> None:
        pass


class CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A destination's memory may still be in use on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return [num_bytes] uint8 of pinned memory. Callable from any thread."""
        with torch.cuda.device(self._device):  # the current device is thread-local
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            if source.dtype != destination.dtype:
                source = source.to(self._device, non_blocking=True)
            destination.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # readers sleep, not spin
        event.record(self._stream)
        return event

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._stream.synchronize()


class RingSink:
    """Destination on a GPU, through a ring of pinned buffers.

    Chunk i may be read after chunk ``i - num_slots`` is delivered.
    """

    def __init__(self, stream: CudaCopyStream, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self._stream = stream
        self._slot_bytes = slot_bytes
        self._slots: list[torch.Tensor | None] = [None] * num_slots
        self._copied: list[torch.cuda.Event | None] = [None] * num_slots

    def buffer(self, index: int, chunk: FileChunk) -> torch.Tensor:
        """Wait for a buffer and return [chunk.size] uint8. Callable from any thread."""
        slot = index % self.num_slots
        copied, memory = self._copied[slot], self._slots[slot]
        if copied is not None:
            copied.synchronize()
        if memory is None:  # late: small models need few
            self._slots[slot] = memory = self._stream.allocate(self._slot_bytes)
        return memory[: chunk.size]

    def deliver(self, index: int, chunk: FileChunk) -> None:
        """Start the copy of a chunk to its tensor. One thread calls this, in order."""
        slot = index % self.num_slots
        memory = self._slots[slot]
        assert memory is not None, "a chunk is read before it is delivered"
        self._stream.copy(memory[: chunk.size].view(chunk.dtype), chunk.destination)
        self._copied[slot] = self._stream.mark()

    def finish(self) -> None:
        self._stream.finish()


ChunkSink = HostSink | RingSink


def num_readers() -> int:
    return min(MAX_READERS, len(os.sched_getaffinity(0)))


def copy_tensors(
    tensors: Mapping[str, StoredTensor], destinations: Mapping[str, torch.Tensor], read: BytesRead
) -> None:
    """Copy tensors to contiguous destinations on one device. Raise `ConfigError`."""
    if not destinations:
        return
    device, num_slots = next(iter(destinations.values())).device, SLOTS_PER_READER * num_readers()
    sink: ChunkSink = HostSink(num_slots)
    if device.type == "cuda":
        sink = RingSink(CudaCopyStream(device), num_slots, SLOT_BYTES)
    stream_chunks(plan_chunks(tensors, destinations, SLOT_BYTES), sink, lambda chunk: read(chunk.size))


def stream_chunks(chunks: Sequence[FileChunk], sink: ChunkSink, delivered: Callable[[FileChunk], None]) -> None:
    """Read and deliver all chunks, calling `delivered`. Raise `ConfigError`."""
    reading: deque[tuple[int, FileChunk, Future[None]]] = deque()

    def deliver_oldest() -> None:
        index, chunk, done = reading.popleft()
        done.result()
        sink.deliver(index, chunk)
        delivered(chunk)

    with contextlib.ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        for path in dict.fromkeys(chunk.file for chunk in chunks):
            with _as_config_error(path):
                descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptors[path])
            os.posix_fadvise(descriptors[path], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        readers = ThreadPoolExecutor(num_readers(), thread_name_prefix="weights")
        stack.callback(readers.shutdown, cancel_futures=True)
        for index, chunk in enumerate(chunks):
            if len(reading) == sink.num_slots:
                deliver_oldest()
            done = readers.submit(_read, descriptors[chunk.file], chunk, sink, index)
            reading.append((index, chunk, done))
        while reading:
            deliver_oldest()
        sink.finish()


def _read(descriptor: int, chunk: FileChunk, sink: ChunkSink, index: int) -> None:
    rest = sink.buffer(index, chunk).numpy().data
    end = chunk.begin + chunk.size
    with _as_config_error(chunk.file):
        while rest:
            size = os.preadv(descriptor, [rest], end - len(rest))
            if size == 0:
                raise ConfigError(f"{chunk.file} became shorter while it was read: download it again")
            rest = rest[size:]


@contextlib.contextmanager
def _as_config_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
