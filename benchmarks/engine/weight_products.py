"""Products of weights of 4, 8 and 16 bits from memory, beside a plain read of them and torch's operators.

A product's bound is the longer of two times: that of a plain read, and that of its arithmetic from registers. Memory
is read in the system's pages, as other programs have it, and in pages of 2 MB, as our weights are.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch

from common.study import BUILD, in_turns
from tidewheel_kernels.grouped_linear import GroupedWeights, LaneWeights, grouped_linear_native, quantize_groups
from tidewheel_kernels.grouped_linear.reference import INPUT_GROUP
from tidewheel_kernels.native.huge_pages import in_huge_pages
from tidewheel_kernels.native.library import FLAGS, LONG, POINTER, SOURCES, find_compiler, processor_flags
from tidewheel_kernels.packed_linear import PackedWeights, packed_linear, packed_linear_cpu

SIZE = 4096  # inputs and outputs
LEAST_BYTES = 160 << 20  # of weights, more than the last cache holds
ROWS = (1, 2, 4, 8, 16, 64, 256)
LANES, VECTOR_BYTES = 16, 64
RATE_SOURCE, RATE_CHAINS, RATE_COUNT = Path(__file__).with_name("multiply_rate.c"), 12, 1_000_000
RATE_VECTORS = RATE_CHAINS * RATE_COUNT


class WeightCopies(NamedTuple):
    """Call of an operator on the next of equal matrices, the bytes of one, and the least arithmetic of a row."""

    call: Callable[[torch.Tensor], object]
    nbytes: int
    row_vectors: int = 0  # multiply-adds of vectors; 0: not known
    kind: str = "multiply_integers"  # of those multiply-adds


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
    # Of a group: its codes, two for the scales, and one for the minimums.
    of_group = INPUT_GROUP * LANES // VECTOR_BYTES + 2 + (weights.minimums is not None)
    return WeightCopies(
        lambda x: grouped_linear_native(x.to(dtype), next(following), None),
        weights.nbytes,
        SIZE // LANES * SIZE // INPUT_GROUP * of_group,
    )


def packed_floats(weight: torch.Tensor, product: Callable[..., object]) -> WeightCopies:
    following = cycle([PackedWeights(weight) for _ in range(LEAST_BYTES // weight.nbytes + 1)])
    call = lambda x: product(x.to(weight.dtype), next(following), None)  # noqa: E731
    return WeightCopies(call, weight.nbytes, weight.nbytes // VECTOR_BYTES, "multiply_floats")


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


def multiply_adds() -> dict[str, float]:
    """Return the least processor time of a vector's multiply-adds, by kind."""
    BUILD.mkdir(exist_ok=True)
    path, operands = BUILD / "multiply_rate.so", torch.ones(3, VECTOR_BYTES, dtype=torch.int8)
    options = [*FLAGS, *processor_flags(), "-DELEMENT_BFLOAT16", f"-I{SOURCES}"]
    subprocess.run([find_compiler(os.environ), *options, str(RATE_SOURCE), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))

    def seconds(name: str) -> float:
        function = getattr(library, name)
        function.argtypes, function.restype = [POINTER] * 3 + [LONG], None
        addresses = [row.data_ptr() for row in operands]
        return min(processor_time(lambda: function(*addresses, RATE_COUNT)) for _ in range(10)) / RATE_VECTORS

    return {name: seconds(name) for name in ("multiply_integers", "multiply_floats")}


def compare_products(repeats: int) -> dict[str, dict[str, Mapping[str, float]]]:
    """Return by number of rows and operator: processor time, bytes a second, and shares of both bounds."""
    results = {}
    all_of, least_times = dict(operators()), multiply_adds()
    memory = torch.ones(2 * LEAST_BYTES // 8, dtype=torch.int64)
    pages = {"read": memory, "read_2mb": in_huge_pages(memory)}
    for num_rows in ROWS:
        x = torch.randn(num_rows, SIZE)
        runs: dict[str, Callable[[], float]] = {}
        for name, copies in all_of.items():
            runs[name] = lambda copies=copies, x=x: processor_time(lambda: copies.call(x))
            for kind, of_kind in pages.items():
                read = plain_read(of_kind, copies.nbytes)
                runs[f"{kind} for {name}"] = lambda read=read: processor_time(read)
        medians = {name: statistics.median(taken) for name, taken in in_turns(runs, repeats, warm_up=2).items()}
        of_rows: dict[str, Mapping[str, float]] = {}
        for name, copies in all_of.items():
            took, least = medians[name], least_times[copies.kind] * num_rows * copies.row_vectors
            shares = {f"share_of_{kind}": medians[f"{kind} for {name}"] / took for kind in pages}
            shares["share_of_arithmetic"] = least / took
            of_rows[name] = {"us": 1e6 * took, "gigabytes_per_s": copies.nbytes / took / 1e9, **shares}
            print(line_of(num_rows, name, of_rows[name]))
        results[str(num_rows)] = of_rows
    return results


def line_of(num_rows: int, name: str, found: Mapping[str, float]) -> str:
    of_arithmetic = found["share_of_arithmetic"]
    return (
        f"{num_rows:4} rows, {name:28} {found['us']:7.0f} us {found['gigabytes_per_s']:5.1f} GB/s, "
        f"{found['share_of_read']:4.0%} of a plain read, {found['share_of_read_2mb']:4.0%} in pages of 2 MB"
        + (f", {of_arithmetic:4.0%} of arithmetic" * (of_arithmetic > 0))
    )


def processor_time(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began
