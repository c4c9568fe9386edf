"""Speed of reading weights: the loader's stream against a plain copy of the bytes.

``python benchmarks/load_speed.py [--record]``

With the file in the page cache, processor time is compared, in turns: a reader thread's cost, whatever else runs.
`straight` reads into a model's tensors on the host; `ring` into the ring's slots without copies to the device, the
host's part of loading onto a GPU; `mapped`, which the loader does not do, copies to such slots from a new mapping;
`memcpy` copies between two tensors written before. The seconds for 16 GB are the ring's on eight such processors with
a bus as fast. Without the file in the cache, ring and mapping take turns in elapsed time, which the disk decides.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from record import environment, save
from tidewheel.models.safetensors_file import SafetensorsFile, plan_chunks
from tidewheel.models.weight_stream import (
    MAX_READERS,
    SLOT_BYTES,
    SLOTS_PER_READER,
    Carrier,
    Event,
    HostCarrier,
    RingCarrier,
    num_readers,
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

    def mark(self) -> Event:
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
    chunks = plan_chunks([SafetensorsFile(path)], destinations, SLOT_BYTES)
    num_slots = SLOTS_PER_READER * num_readers()
    ring = RingCarrier(_NoDevice(), num_slots, SLOT_BYTES)

    def stream(carrier: Carrier) -> None:
        stream_chunks(chunks, carrier, lambda _: None)

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
        "ring": lambda: stream(ring),
        "straight": lambda: stream(HostCarrier(num_slots)),
    }
    for run in runs.values():
        run()
    cold = {name: runs[name] for name in ("ring", "mapped")}
    return sampled(runs, processor_seconds), sampled(cold, lambda run: elapsed_cold(path, run))


def sampled(
    runs: Mapping[str, Callable[[], object]], seconds: Callable[[Callable[[], object]], float]
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(NUM_SAMPLES):
        for name, run in runs.items():
            samples[name].append(seconds(run))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/load_speed.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        samples, cold = measure(Path(folder))
    num_bytes = NUM_TENSORS * ROWS * COLUMNS * torch.bfloat16.itemsize
    medians = {name: statistics.median(values) for name, values in samples.items()}
    result = {
        **environment("torch"),
        "bytes": num_bytes,
        "gb_per_processor_second": {name: num_bytes / seconds / 1e9 for name, seconds in medians.items()},
        "ratio_to_memcpy": {name: medians["memcpy"] / seconds for name, seconds in medians.items()},
        "seconds_for_16_gb_on_8_processors": MODEL_BYTES / num_bytes * medians["ring"] / MAX_READERS,
        "samples": samples,
        "cold_mapped_to_ring": statistics.median(a / b for a, b in zip(cold["mapped"], cold["ring"], strict=True)),
        "cold_samples": cold,
    }
    for name, rate in result["gb_per_processor_second"].items():
        print(f"{name:10} {rate:6.2f} GB per processor second, {result['ratio_to_memcpy'][name]:.2f} of memcpy")
    print(f"16 GB on {MAX_READERS} processors: {result['seconds_for_16_gb_on_8_processors']:.2f} s")
    print(f"from a cold cache a mapping takes {result['cold_mapped_to_ring']:.1f} times as long as the ring")
    if options.record:
        save("load_speed", result)


if __name__ == "__main__":
    main()
