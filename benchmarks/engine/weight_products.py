"""Products of weights of 4, 8 and 16 bits from memory, beside a plain read of them and torch's operators."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

import torch

from common.study import in_turns
from tidewheel_kernels.grouped_linear import GroupedWeights, LaneWeights, grouped_linear_native, quantize_groups
from tidewheel_kernels.packed_linear import PackedWeights, packed_linear, packed_linear_cpu

SIZE = 4096  # inputs and outputs
LEAST_BYTES = 160 << 20  # of weights, more than the last cache holds
ROWS = (1, 2, 4, 8, 16, 64, 256)


class WeightCopies(NamedTuple):
    """Call of an operator on the next of equal matrices, and the bytes of one."""

    call: Callable[[torch.Tensor], object]
    nbytes: int


def copies_of(
    tensors: Sequence[torch.Tensor | None], call: Callable[..., object], dtype: torch.dtype
) -> WeightCopies:
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    copies = [
        [tensor if tensor is None else tensor.clone() for tensor in tensors] for _ in range(LEAST_BYTES // nbytes + 1)
    ]
    following = cycle(copies)
    return WeightCopies(lambda x: call(x.to(dtype), *next(following)), nbytes)


def ours(weights: GroupedWeights, dtype: torch.dtype) -> WeightCopies:
    following = cycle([LaneWeights(weights) for _ in range(LEAST_BYTES // weights.nbytes + 1)])
    return WeightCopies(lambda x: grouped_linear_native(x.to(dtype), next(following), None), weights.nbytes)


def packed_floats(weight: torch.Tensor, product: Callable[..., object]) -> WeightCopies:
    following = cycle([PackedWeights(weight) for _ in range(LEAST_BYTES // weight.nbytes + 1)])
    return WeightCopies(lambda x: product(x.to(weight.dtype), next(following), None), weight.nbytes)


def plain_read(memory: torch.Tensor, nbytes: int) -> Callable[[], object]:
    """Return a call that reads so many bytes, the next of a larger memory."""
    following = cycle(memory.split(nbytes // memory.itemsize)[:-1])
    return lambda: next(following).sum()


def operators() -> Iterator[tuple[str, WeightCopies]]:
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    for bits in (8, 4):
        yield f"{bits} bits", ours(quantize_groups(weight, bits), torch.float32)
    plain = quantize_groups(weight, 4)._replace(minimums=None)
    yield "4 bits without minimums", ours(plain, torch.float32)
    yield "bfloat16", packed_floats(weight.bfloat16(), packed_linear)
    yield "oneDNN bfloat16", packed_floats(weight.bfloat16(), packed_linear_cpu)
    codes = torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8)
    scales = torch.rand(SIZE).bfloat16()
    yield "_weight_int8pack_mm", copies_of((codes, scales), torch._weight_int8pack_mm, torch.bfloat16)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((codes & 15).int(), 1)
    factors = torch.rand(SIZE // 32, SIZE, 2).bfloat16()
    yield (
        "_weight_int4pack_mm_for_cpu",
        copies_of((packed, factors), lambda x, w, s: torch._weight_int4pack_mm_for_cpu(x, w, 32, s), torch.bfloat16),
    )
    yield "oneDNN int8", dynamic_linear(weight)


def dynamic_linear(weight: torch.Tensor) -> WeightCopies:
    """Return torch's dynamic quantised linear: a scale for each output, and one for all inputs."""
    torch.backends.quantized.engine = "onednn"
    scales = weight.abs().amax(1) / 127
    rounded = torch.quantize_per_channel(
        weight, scales.double(), torch.zeros(SIZE, dtype=torch.int64), 0, torch.qint8
    )
    prepack, run = torch.ops.quantized.linear_prepack, torch.ops.quantized.linear_dynamic
    following = cycle([prepack(rounded, None) for _ in range(LEAST_BYTES // SIZE**2 + 1)])
    return WeightCopies(lambda x: run(x, next(following)), SIZE**2)


def compare_products(repeats: int) -> dict[str, dict[str, Mapping[str, float]]]:
    """Return by number of rows and operator: processor time, bytes a second, and the share of a plain read's rate."""
    results = {}
    all_of = dict(operators())
    memory = torch.ones(2 * LEAST_BYTES // 8, dtype=torch.int64)
    reads = {name: plain_read(memory, copies.nbytes) for name, copies in all_of.items()}
    for num_rows in ROWS:
        x = torch.randn(num_rows, SIZE)
        runs: dict[str, Callable[[], float]] = {}
        for name, copies in all_of.items():
            runs[name] = lambda copies=copies, x=x: processor_time(lambda: copies.call(x))
            runs[f"read for {name}"] = lambda name=name: processor_time(reads[name])
        samples = in_turns(runs, repeats, warm_up=2)
        of_rows: dict[str, Mapping[str, float]] = {}
        for name, copies in all_of.items():
            took, read = statistics.median(samples[name]), statistics.median(samples[f"read for {name}"])
            share, rate = read / took, copies.nbytes / took / 1e9
            of_rows[name] = {"us": 1e6 * took, "gigabytes_per_s": rate, "share_of_read": share}
            print(f"{num_rows:4} rows, {name:28} {1e6 * took:7.0f} us {rate:5.1f} GB/s, {share:4.0%} of a plain read")
        results[str(num_rows)] = of_rows
    return results


def processor_time(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began
