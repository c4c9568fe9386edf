"""Weights arrive whole and in bounded memory, through a device that is as late as a real one may be."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tidewheel.errors import ConfigError
from tidewheel.models import weight_stream
from tidewheel.models.weight_source import read_tensors, uncounted
from tidewheel.models.weight_stream import (
    BytesRead,
    FileChunk,
    PinnedRing,
    StoredTensor,
    copy_tensors,
    load_to_host,
    plan_chunks,
    stream_chunks,
)

SLOT_BYTES = 256
NUM_SLOTS = 3

Copy = tuple[torch.Tensor, torch.Tensor]


class LateLane:
    """Copies nothing before somebody waits for it, as a device may that is far behind."""

    def __init__(self) -> None:
        self.allocated: list[torch.Tensor] = []
        self.num_copies = 0
        self._queue: list[Copy] = []
        self._lock = threading.Lock()
        self._num_done = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        self.allocated.append(memory)
        return memory

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        with self._lock:
            self._queue.append((source, destination))
            self.num_copies += 1

    def mark(self) -> LateEvent:
        return LateEvent(self, self.num_copies)

    def finish(self) -> None:
        self.advance_to(self.num_copies)

    def advance_to(self, count: int) -> None:
        with self._lock:
            for source, destination in self._queue[self._num_done : count]:
                destination.copy_(source)
            self._num_done = max(self._num_done, count)


class LateEvent:
    def __init__(self, lane: LateLane, position: int) -> None:
        self._lane = lane
        self._position = position

    def synchronize(self) -> None:
        self._lane.advance_to(self._position)


class HastyLane(LateLane):
    """The mistake that the ring must not make: reads into a slot whose copies may not be done."""

    def mark(self) -> LateEvent:
        return LateEvent(self, 0)


def through_ring(lane: LateLane, chunks: list[FileChunk], done: BytesRead = uncounted) -> None:
    stream_chunks(chunks, PinnedRing(lane, NUM_SLOTS, SLOT_BYTES).load, done)
    lane.finish()


def to_host(chunks: list[FileChunk]) -> None:
    stream_chunks(chunks, load_to_host, uncounted)


def checkpoint(folder: Path, num_files: int = 3) -> tuple[dict[str, StoredTensor], dict[str, torch.Tensor]]:
    """Tensors of many sizes and dtypes: some larger than a slot, some empty, some at odd places of the file."""
    chance = random.Random(0)
    tensors: dict[str, torch.Tensor] = {}
    stored: dict[str, StoredTensor] = {}
    for number in range(num_files):
        part = {}
        for i in range(12):
            dtype = chance.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
            shape = (chance.choice((0, 1, 3, 40)), chance.choice((1, 7, 33)))
            part[f"{number}.{i}"] = torch.randn(shape).to(dtype)
        part[f"{number}.odd"] = torch.arange(5, dtype=torch.uint8)
        save_file(part, folder / f"{number}.safetensors")
        stored |= read_tensors(folder / f"{number}.safetensors")
        tensors |= part
    return stored, tensors


def empty_like(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(t.shape, dtype=dtype or t.dtype) for name, t in tensors.items()}


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["as they are", "converted"])
@pytest.mark.parametrize("load", [to_host, lambda chunks: through_ring(LateLane(), chunks)], ids=["host", "ring"])
def test_every_tensor_arrives(
    tmp_path: Path, load: Callable[[list[FileChunk]], None], dtype: torch.dtype | None
) -> None:
    stored, tensors = checkpoint(tmp_path)
    destinations = empty_like(tensors, dtype)
    load(plan_chunks(stored, destinations, SLOT_BYTES))
    for name, tensor in tensors.items():
        assert torch.equal(destinations[name], tensor.to(destinations[name].dtype)), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["as they are", "converted"])
def test_every_tensor_arrives_on_a_gpu(
    tmp_path: Path, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_stream, "SLOT_BYTES", SLOT_BYTES)
    device = torch.device("cuda", torch.cuda.current_device())
    stored, tensors = checkpoint(tmp_path, num_files=40)
    destinations = {name: tensor.to(device) for name, tensor in empty_like(tensors, dtype).items()}
    copy_tensors(stored, destinations, uncounted)
    for name, tensor in tensors.items():
        assert torch.equal(destinations[name].cpu(), tensor.to(destinations[name].dtype)), name


def test_a_slot_is_read_into_only_after_its_copies(tmp_path: Path) -> None:
    """Without the wait the same stream delivers wrong weights: the late lane would show it."""
    stored, tensors = checkpoint(tmp_path)
    destinations = empty_like(tensors, None)
    through_ring(HastyLane(), plan_chunks(stored, destinations, SLOT_BYTES))
    assert any(not torch.equal(destinations[name], tensor) for name, tensor in tensors.items())


def test_host_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    stored, tensors = checkpoint(tmp_path, num_files=6)
    lane = LateLane()
    chunks = plan_chunks(stored, empty_like(tensors, None), SLOT_BYTES)
    through_ring(lane, chunks)
    assert len(chunks) > 10 * NUM_SLOTS
    assert [memory.nbytes for memory in lane.allocated] == [SLOT_BYTES] * NUM_SLOTS


def test_chunks_are_counted_in_order(tmp_path: Path) -> None:
    stored, tensors = checkpoint(tmp_path)
    chunks, seen = plan_chunks(stored, empty_like(tensors, None), SLOT_BYTES), list[int]()
    through_ring(LateLane(), chunks, seen.append)
    assert seen == [chunk.size for chunk in chunks]


def test_a_plan_covers_every_byte_once_and_nothing_else(tmp_path: Path) -> None:
    stored, tensors = checkpoint(tmp_path)
    destinations = {name: t for name, t in empty_like(tensors, None).items() if not name.endswith(".3")}
    chunks = plan_chunks(stored, destinations, SLOT_BYTES)
    assert all(chunk.size <= SLOT_BYTES for chunk in chunks)
    for file in {item.file for item in stored.values()}:
        planned = [(chunk.begin, chunk.begin + chunk.size) for chunk in chunks if chunk.file == file]
        wanted = [
            (item.begin, item.begin + item.num_bytes)
            for name, item in stored.items()
            if name in destinations and item.file == file
        ]
        assert planned == sorted(planned)
        assert covered(planned) == covered(wanted)


def covered(ranges: list[tuple[int, int]]) -> set[int]:
    positions = [position for begin, end in ranges for position in range(begin, end)]
    assert len(positions) == len(set(positions))
    return set(positions)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    stored, tensors = checkpoint(tmp_path)
    path = tmp_path / "1.safetensors"
    with path.open("r+b") as handle:
        handle.truncate(min(item.begin for item in stored.values() if item.file == path) + 10)
    with pytest.raises(ConfigError) as caught:
        through_ring(LateLane(), plan_chunks(stored, empty_like(tensors, None), SLOT_BYTES))
    assert str(caught.value) == f"{path} became shorter while it was read: download it again"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, tensors = checkpoint(tmp_path)
    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(ConfigError) as caught:
        through_ring(LateLane(), plan_chunks(stored, empty_like(tensors, None), SLOT_BYTES))
    assert str(caught.value) == f"{tmp_path / '0.safetensors'} cannot be read: Input/output error"


def fail(*_arguments: object) -> int:
    raise OSError(5, "Input/output error")


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    stored, tensors = checkpoint(tmp_path)
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"2\.safetensors cannot be read: No such file or directory"):
        through_ring(LateLane(), plan_chunks(stored, empty_like(tensors, None), SLOT_BYTES))


def test_reads_that_come_in_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    stored, tensors = checkpoint(tmp_path)
    whole = os.preadv
    monkeypatch.setattr("os.preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:7]], offset))
    destinations = empty_like(tensors, None)
    to_host(plan_chunks(stored, destinations, SLOT_BYTES))
    assert all(torch.equal(destinations[name], tensor) for name, tensor in tensors.items())


def test_who_stops_the_load_leaves_no_thread_and_no_open_file(tmp_path: Path) -> None:
    stored, tensors = checkpoint(tmp_path)
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    delivered: list[int] = []

    def stop(num_bytes: int) -> None:
        delivered.append(num_bytes)
        if len(delivered) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        through_ring(LateLane(), plan_chunks(stored, empty_like(tensors, None), SLOT_BYTES), stop)
    assert len(delivered) == 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
