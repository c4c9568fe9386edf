"""Tensors in files, read by threads into host memory, or through a pinned ring.

If a file shrinks, preadv(2) returns fewer bytes; a memory mapping would end the process (SIGBUS).
"""

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch

from tidewheel.errors import ConfigError
from tidewheel.models.linear import GroupFormat
from tidewheel.models.shard import TensorPart
from tidewheel.regular_files import as_config_error

MAX_READERS = 8  # outrun a PCIe 5.0 x16 link
SLOT_BYTES = 8 << 20
SLOTS_PER_READER = 2  # one is read while the other is copied

BytesRead = Callable[[int], None]  # called with the bytes read since the last call
ReadInto = Callable[[torch.Tensor], None]  # reads a chunk into [chunk.size] uint8


class StoredTensor(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    kind: torch.dtype | GroupFormat
    begin: int = 0  # byte of the file
    part: TensorPart | None = None  # that is loaded; None: all of it

    @property
    def part_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        if self.part is not None:
            shape[self.part.axis] = self.part.end - self.part.begin
        return tuple(shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that loading reads: whole rows, even if the part is of some columns."""
        size = math.prod(self.part_shape[:1] + self.shape[1:])
        return self.kind.num_bytes(size) if isinstance(self.kind, GroupFormat) else size * self.kind.itemsize


class FileChunk(NamedTuple):
    """Rows in a file; a tensor whose columns are all loaded has rows of one value."""

    file: Path
    begin: int  # byte of the file
    dtype: torch.dtype  # in the file
    width: int  # values of a row
    columns: slice  # that are loaded
    destination: torch.Tensor  # [num_rows, num_columns]

    @property
    def size(self) -> int:
        """Return the bytes that are read."""
        return len(self.destination) * self.width * self.dtype.itemsize

    def selected(self, memory: torch.Tensor) -> torch.Tensor:
        """Return what `destination` holds of `memory`, the chunk's bytes [size] of the file."""
        return memory.view(self.dtype).view(-1, self.width)[:, self.columns]


LoadChunk = Callable[[FileChunk, ReadInto], None]


def plan_chunks(
    tensors: Mapping[str, StoredTensor], destinations: Mapping[str, torch.Tensor], max_bytes: int
) -> list[FileChunk]:
    """Return chunks of the destinations' tensors, in the order of the files."""
    chunks: list[FileChunk] = []
    for name in sorted(destinations, key=lambda name: (tensors[name].file, tensors[name].begin)):
        file, shape, dtype, begin, part = tensors[name]
        assert isinstance(dtype, torch.dtype)
        rows, width, columns = destinations[name].view(-1, 1), 1, slice(None)
        if part is not None and part.axis == 1:
            rows, width, columns = destinations[name], shape[1], slice(part.begin, part.end)
        elif part is not None:
            begin += part.begin * math.prod(shape[1:]) * dtype.itemsize
        for piece in torch.split(rows, max(max_bytes // (width * dtype.itemsize), 1)):
            if piece.numel():
                chunks.append(FileChunk(file, begin, dtype, width, columns, piece))
                begin += chunks[-1].size
    return chunks


def load_to_host(chunk: FileChunk, read: ReadInto) -> None:
    """Read a chunk in place, or through a buffer to convert the dtype or select columns."""
    if chunk.dtype == chunk.destination.dtype and chunk.width == 1:
        read(chunk.destination.view(-1).view(torch.uint8))
        return
    memory = torch.empty(chunk.size, dtype=torch.uint8)
    read(memory)
    chunk.destination.copy_(chunk.selected(memory))


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
            if source.dtype != destination.dtype or not source.is_contiguous():
                source = source.to(self._device, non_blocking=True)
            destination.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # readers sleep, not spin
        event.record(self._stream)
        return event

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._stream.synchronize()


class PinnedRing:
    """Pinned buffers between files and a GPU. Each is read into again after its copy, the oldest first."""

    def __init__(self, stream: CudaCopyStream, num_slots: int, slot_bytes: int) -> None:
        self._stream = stream
        self._slot_bytes = slot_bytes
        self._slots: SimpleQueue[tuple[torch.Tensor, torch.cuda.Event] | None] = SimpleQueue()
        for _ in range(num_slots):
            self._slots.put(None)  # allocated late: small models need few

    def load(self, chunk: FileChunk, read: ReadInto) -> None:
        slot = self._slots.get()
        try:
            if slot is None:
                memory = self._stream.allocate(self._slot_bytes)
            else:
                memory, copied = slot
                copied.synchronize()
            read(memory[: chunk.size])
            self._stream.copy(chunk.selected(memory[: chunk.size]), chunk.destination)
            slot = memory, self._stream.mark()
        finally:
            self._slots.put(slot)


def num_readers() -> int:
    return min(MAX_READERS, len(os.sched_getaffinity(0)))


def copy_tensors(
    tensors: Mapping[str, StoredTensor], destinations: Mapping[str, torch.Tensor], read: BytesRead
) -> None:
    """Copy tensors to contiguous destinations on one device. Raise `ConfigError`."""
    if not destinations:
        return
    device = next(iter(destinations.values())).device
    chunks = plan_chunks(tensors, destinations, SLOT_BYTES)
    if device.type != "cuda":
        stream_chunks(chunks, load_to_host, read)
        return
    stream = CudaCopyStream(device)
    stream_chunks(chunks, PinnedRing(stream, SLOTS_PER_READER * num_readers(), SLOT_BYTES).load, read)
    stream.finish()


def stream_chunks(chunks: Sequence[FileChunk], load: LoadChunk, done: BytesRead) -> None:
    """Call `load` with each chunk in threads, and `done` here in their order. Raise `ConfigError`."""
    with contextlib.ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        for path in dict.fromkeys(chunk.file for chunk in chunks):
            with as_config_error(path):
                descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptors[path])
            os.posix_fadvise(descriptors[path], 0, 0, os.POSIX_FADV_SEQUENTIAL)

        @torch.inference_mode()  # threads do not inherit it, and destinations may be inference tensors
        def run(chunk: FileChunk) -> int:
            load(chunk, partial(_read, descriptors[chunk.file], chunk))
            return chunk.size

        readers = ThreadPoolExecutor(num_readers(), thread_name_prefix="weights")
        stack.callback(readers.shutdown, cancel_futures=True)
        for num_bytes in readers.map(run, chunks):
            done(num_bytes)


def _read(descriptor: int, chunk: FileChunk, memory: torch.Tensor) -> None:
    rest, end = memory.numpy().data, chunk.begin + chunk.size
    with as_config_error(chunk.file):
        while rest:
            size = os.preadv(descriptor, [rest], end - len(rest))
            if size == 0:
                raise ConfigError(f"{chunk.file} became shorter while it was read: download it again")
            rest = rest[size:]
