"""Predicted decode steps of a GPU whose rows have LoRA adapters, beside steps of the base model.

Each of a layer's four products (query-key-value, output, gate-up, down) is followed by two kernels: `shrink` computes
a row's A x, `expand` adds its B (A x). Tokens are grouped by adapter into tiles, and a program computes one tile; all
programs read the padded slots of their adapter once. Graphs hold, so the host adds nothing that it does not hide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from modelled.roofline import SHAPES, Shape
from modelled.step_model import FACTORS, NUM_MULTIPROCESSORS, Factor, Host, Model, Work, step_host_s
from modelled.tensor_parallel import ENDS, MACHINES

MACHINE = "H100 SXM"
MODELS = ("qwen3-0.6b", "qwen3-8b")
ROWS, CONTEXT, RANK = 64, 512, 16
ADAPTERS = (1, 32)
TILE_ROWS = 16  # the least of a tensor instruction, padded
EXPANDED_COLUMNS = 128  # of a program of `expand`
LORA_FACTORS = {
    "multiprocessor": Factor(
        50e9, 100e9, "bytes/s of one multiprocessor", "estimate",
        "two or three tiles of 16 KB in flight over some 700 ns; the L2 cache gives 64 bytes a cycle",
    ),
    "start of a program": Factor(
        3e-6, 1.5e-6, "s", "estimate", "slot and rows, then the matrices: two trips to memory before a product",
    ),
}  # fmt: skip


class Product(NamedTuple):
    """One product of a layer, which several linears of a checkpoint may share."""

    inputs: int
    outputs: int  # of all parts
    parts: int


class Delta(NamedTuple):
    """Least work of all adapters in one step, in all layers."""

    num_bytes: int
    flops: int
    kernels: int
    seconds: float


def products(shape: Shape, *, attention_only: bool = False) -> tuple[Product, ...]:
    """Return the products that have adapters; `attention_only`: of queries, keys and values only."""
    queries, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    first = Product(shape.hidden, queries + 2 * kv, 3)
    others = (
        Product(queries, shape.hidden, 1),
        Product(shape.hidden, 2 * shape.intermediate, 2),
        Product(shape.intermediate, shape.hidden, 1),
    )
    return (first,) if attention_only else (first, *others)


def delta(shape: Shape, adapters: int, end: str, *, attention_only: bool = False) -> Delta:
    """Return what the adapters of a step of `ROWS` rows add to the base model's work."""
    total = Delta(0, 0, 0, 0.0)
    for product in products(shape, attention_only=attention_only):
        for num_bytes, flops, programs in kernels(product, adapters):
            total = Delta(
                total.num_bytes + shape.layers * num_bytes,
                total.flops + shape.layers * flops,
                total.kernels + shape.layers,
                total.seconds + shape.layers * seconds(num_bytes, flops, programs, end),
            )
    return total


def kernels(product: Product, adapters: int) -> Iterator[tuple[int, int, int]]:
    """Yield bytes, operations and programs of `shrink` and of `expand`."""
    tiles = adapters * -(-ROWS // (adapters * TILE_ROWS))
    ranks = product.parts * RANK
    hidden = 4 * ROWS * ranks  # float32 between the two kernels
    shrunk = 2 * adapters * ranks * product.inputs + 2 * ROWS * product.inputs + hidden
    yield shrunk, 2 * tiles * TILE_ROWS * ranks * product.inputs, tiles * product.parts
    expanded = 2 * adapters * RANK * product.outputs + 2 * 2 * ROWS * product.outputs + hidden
    yield expanded, 2 * tiles * TILE_ROWS * RANK * product.outputs, tiles * -(-product.outputs // EXPANDED_COLUMNS)


def seconds(num_bytes: int, flops: int, programs: int, end: str) -> float:
    """Return the longer of memory, of what the busy multiprocessors can read, and of arithmetic; and the starts."""
    device, busy = MACHINES[MACHINE].device, min(programs, NUM_MULTIPROCESSORS)
    memory_s = num_bytes / (_at("small kernels", end) * device.copy_bandwidth)
    read_s = num_bytes / (busy * _at("multiprocessor", end))
    arithmetic_s = flops / (device.flops * busy / NUM_MULTIPROCESSORS)
    return max(memory_s, read_s, arithmetic_s) + _at("start of a program", end) + _at("kernel boundary", end)


def _at(name: str, end: str) -> float:
    return float(getattr((FACTORS | LORA_FACTORS)[name], end))


def predictions() -> Iterator[dict[str, Any]]:
    """Yield what each model keeps of its base's tokens/s; pairs are the slow and the fast end of every factor."""
    host = Host(step_host_s("qwen3-0.6b"), 0.0, 0.0)
    for name in MODELS:
        shape = SHAPES[name]
        bases = [Model(shape, host, end, device=MACHINES[MACHINE].device) for end in ENDS]
        base_s = [base.step(Work(ROWS, CONTEXT)).seconds for base in bases]
        for adapters in ADAPTERS:
            for linears in ("all", "q,k,v"):
                added = [delta(shape, adapters, end, attention_only=linears != "all") for end in ENDS]
                yield {
                    "model": name,
                    "adapters": adapters,
                    "linears": linears,
                    "mb": added[0].num_bytes / 1e6,
                    "gflop": added[0].flops / 1e9,
                    "kernels": added[0].kernels,
                    "base_ms": [round(1e3 * base, 2) for base in base_s],
                    "added_ms": [round(1e3 * one.seconds, 2) for one in added],
                    "of_base": [
                        round(base / (base + one.seconds), 3) for base, one in zip(base_s, added, strict=True)
                    ],
                }
