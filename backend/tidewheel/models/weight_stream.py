"""Threaded reading of checkpoint chunks, in order and bounded memory."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from tidewheel.errors import ConfigError
from tidewheel.models.weight_carrier import Carrier, CudaLane, HostCarrier, RingCarrier
from tidewheel.models.weight_plan import Chunk

# Eight readers outrun a PCIe 5.0 x16 link; slots are large enough that copying dominates.
MAX_READERS = 8
SLOT_BYTES = 8 << 20
SLOTS_PER_READER = 2  # one is read while the other is copied


def num_readers() -> int:
    return min(MAX_READERS, len(os.sched_getaffinity(0)))


def carrier_to(device: torch.device) -> Carrier:
    num_slots = SLOTS_PER_READER * num_readers()
    if device.type == "cuda":
        return RingCarrier(CudaLane(device), num_slots, SLOT_BYTES)
    return HostCarrier(num_slots)


def stream_chunks(chunks: Sequence[Chunk], carrier: Carrier, delivered: Callable[[Chunk], None]) -> None:
    """Read, deliver and report every chunk; return when all have arrived.

    Raise `ConfigError`, naming the file, if it cannot be read or ends early. On any error reading stops and no thread
    is left.
    """
    reading: deque[tuple[int, Chunk, Future[None]]] = deque()

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
def _opened(chunks: Sequence[Chunk]) -> Iterator[dict[Path, int]]:
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


def _read(descriptor: int, chunk: Chunk, carrier: Carrier, index: int) -> None:
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
    """Return the buffers without their first `skipped` bytes."""
    rest = []
    for buffer in buffers:
        if skipped < len(buffer):
            rest.append(buffer[skipped:])
        skipped = max(skipped - len(buffer), 0)
    return rest
