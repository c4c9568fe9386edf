"""Speeds this device reaches: copies, bf16 matrix products, the bus both ways."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

import torch

from gpu.measurements import Ceilings, Measurement, duration, throughput
from gpu.stage import Stage, parser, run
from gpu.timing import Call, Timer

COPY_BYTES = 4 << 30
MATRIX = 8192
BUS_BYTES = 1 << 30
TORCH = "torch"
SMALL_GRID = 1024  # next to no work


def measure(stage: Stage) -> Ceilings:
    timer = Timer(stage.device, is_dry=stage.is_dry)
    copied = (1 << 20) if stage.is_dry else COPY_BYTES
    size = 64 if stage.is_dry else MATRIX
    crossing = (1 << 20) if stage.is_dry else BUS_BYTES
    copy = timer.measure(lambda _: _copy(copied, stage.device), 2 * copied).seconds
    multiply = timer.measure(lambda _: _multiply(size, stage.device), 6 * size * size).seconds
    found = throughput("copy", f"{copied >> 20} MiB", copy, 2e-9 * copied, "GB/s", None, who=TORCH)
    products = throughput(
        "bf16 matrix product", f"{size} cubed", multiply, 2e-12 * size**3, "TFLOP/s", None, who=TORCH
    )
    stage.result(found)
    stage.result(products)
    stage.result(_kernel_boundary(stage, timer))
    out, back = (_bus(stage, timer, crossing, to_host) for to_host in (True, False))
    return Ceilings(1e9 * found.value, 1e12 * products.value, out, back)


def _copy(num_bytes: int, device: torch.device) -> Call:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def _multiply(size: int, device: torch.device) -> Call:
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return partial(torch.mm, left, right, out=torch.empty_like(left))


def _kernel_boundary(stage: Stage, timer: Timer) -> Measurement:
    """Time tiny kernels in a graph, the least cost of any kernel."""
    small = torch.zeros(SMALL_GRID, device=stage.device)
    seconds = timer.measure(lambda _: partial(small.add_, 1.0), 1 << 40).seconds
    return duration("kernel boundary", "chain of tiny kernels in a graph", seconds, None, who=TORCH)


def _bus(stage: Stage, timer: Timer, num_bytes: int, to_host: bool) -> float:
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=stage.is_cuda)
    device = torch.empty(num_bytes, dtype=torch.uint8, device=stage.device)
    target, source = (host, device) if to_host else (device, host)
    seconds = timer.measure(lambda _: partial(target.copy_, source, non_blocking=True), 2 * num_bytes).seconds
    direction = "to pinned host memory" if to_host else "from pinned host memory"
    stage.result(throughput("bus", direction, seconds, 1e-9 * num_bytes, "GB/s", None, who=TORCH))
    return num_bytes / statistics.median(seconds)


def body(stage: Stage) -> None:
    ceilings = measure(stage)
    if stage.options.ceilings_out:
        ceilings.save(stage.options.ceilings_out)
    if stage.is_cuda:
        properties = torch.cuda.get_device_properties(stage.device)
        stage.facts(
            device=properties.name,
            multiprocessors=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            l2_bytes=properties.L2_cache_size,
            capability=list(torch.cuda.get_device_capability(stage.device)),
            cuda=torch.version.cuda,
        )


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--ceilings-out", type=Path, help="write them there, for --ceilings of the other stages")
    run("ceilings", body, made.parse_args())
