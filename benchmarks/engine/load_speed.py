"""Speed of reading weights: the loader's stream against a plain copy of the bytes.

    python benchmarks load_speed --save

With the file in the page cache, processor time is compared: what a reader thread costs, whatever else runs.
`straight` reads into a model's tensors on the host. `ring` reads into the ring's slots, the host's part of loading
onto a GPU. `mapped`, which the loader does not do, copies to such slots from a new mapping. `memcpy` copies between
tensors. The seconds for 16 GB are the ring's on eight such processors. Without the file in the cache, ring and
mapping are compared in elapsed time, which the disk decides.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.study import Study, in_turns
from tidewheel.models.weight_source import read_tensors
from tidewheel.models.weight_stream import (
    MAX_READERS,
    SLOT_BYTES,
    SLOTS_PER_READER,
    LoadChunk,
    PinnedRing,
    load_to_host,
    num_readers,
    plan_chunks,
    stream_chunks,
)

NUM_TENSORS = 16
ROWS, COLUMNS = 4096, 4096  # 32 MiB in bfloat16
MODEL_BYTES = 16e9
NUM_SAMPLES = 7


class _NoDevice:
    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        pass

    def mark(self) -> _NoDevice:
        return self

    def synchronize(self) -> None:
        pass

    def finish(self) -> None:
        pass


def processor_seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def elapsed_cold(path: Path, run: Callable[[], object]) -> float:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(folder: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return samples by name: processor seconds (warm cache) and elapsed seconds (cold)."""
    tensors = {str(i): torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16) for i in range(NUM_TENSORS)}
    path = folder / "model.safetensors"
    save_file(tensors, path)
    destinations = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    chunks = plan_chunks(read_tensors(path), destinations, SLOT_BYTES)
    ring = PinnedRing(_NoDevice(), SLOTS_PER_READER * num_readers(), SLOT_BYTES)

    def stream(load: LoadChunk) -> None:
        stream_chunks(chunks, load, lambda _: None)

    def memcpy() -> None:
        for name, tensor in tensors.items():
            destinations[name].copy_(tensor)

    def mapped() -> None:
        slot = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
            source = torch.frombuffer(content, dtype=torch.uint8)
            for piece in torch.split(source, SLOT_BYTES):
                slot[: len(piece)].copy_(piece)
            del source, piece  # viewed mappings cannot be closed

    runs = {
        "mapped": mapped,
        "memcpy": memcpy,
        "ring": lambda: stream(ring.load),
        "straight": lambda: stream(load_to_host),
    }
    warm = {name: lambda run=run: processor_seconds(run) for name, run in runs.items()}
    cold = {name: lambda run=runs[name]: elapsed_cold(path, run) for name in ("ring", "mapped")}
    return in_turns(warm, NUM_SAMPLES), in_turns(cold, NUM_SAMPLES, warm_up=0)


def main() -> None:
    study = Study("load_speed", __doc__, "torch")
    study.begin()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        samples, cold = measure(Path(folder))
    num_bytes = NUM_TENSORS * ROWS * COLUMNS * torch.bfloat16.itemsize
    medians = {name: statistics.median(values) for name, values in samples.items()}
    rates = {name: num_bytes / seconds / 1e9 for name, seconds in medians.items()}
    ratios = {name: medians["memcpy"] / seconds for name, seconds in medians.items()}
    ring_s = MODEL_BYTES / num_bytes * medians["ring"] / MAX_READERS
    cold_ratio = statistics.median(a / b for a, b in zip(cold["mapped"], cold["ring"], strict=True))
    for name, rate in rates.items():
        print(f"{name:10} {rate:6.2f} GB per processor second, {ratios[name]:.2f} of memcpy")
    print(f"16 GB on {MAX_READERS} processors: {ring_s:.2f} s")
    print(f"from a cold cache a mapping takes {cold_ratio:.1f} times as long as the ring")
    result = {
        "bytes": num_bytes,
        "gb_per_processor_second": rates,
        "ratio_to_memcpy": ratios,
        "seconds_for_16_gb_on_8_processors": ring_s,
        "cold_mapped_to_ring": cold_ratio,
    }
    study.save(result)


if __name__ == "__main__":
    main()
