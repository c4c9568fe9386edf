"""CPU kernels beside torch's operations, in turns on one thread, for steps of a 40M-parameter Qwen3.

    python benchmarks cpu_kernels --save

Attention reads the caches of eight layers in turn, as a step does, so that keys come from memory; decodes of 4,096
tokens, beside a plain read of their keys and values, and products of weights read more than the last cache holds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from typing import NamedTuple

import numpy as np
import torch

from common.study import Study, in_turns
from engine.weight_products import LEAST_BYTES, compare_products
from tidewheel_kernels import AttentionMetadata, write_kv_cache
from tidewheel_kernels.activation import silu_and_mul_native
from tidewheel_kernels.activation.cpu import silu_and_mul_cpu
from tidewheel_kernels.attention import paged_attention_native
from tidewheel_kernels.attention.cpu import paged_attention_cpu
from tidewheel_kernels.kv_cache.codes import INT8, codes_of, head_bytes
from tidewheel_kernels.native.library import native_library
from tidewheel_kernels.norm import rms_norm_native
from tidewheel_kernels.norm.cpu import rms_norm_cpu
from tidewheel_kernels.rope import rope_and_cache_native
from tidewheel_kernels.rope.cpu import rope_and_cache_cpu

ROWS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 512, 1536, 8, 4, 64, 8
BLOCK_SIZE, SHORTEST, LONGEST = 16, 20, 200
WARM_UP = 2 * LAYERS
LONG_CONTEXT = 4096
LONG_SHAPES = {"SmolLM2-135M": (9, 3, 64), "Qwen3-0.6B": (16, 8, 128)}  # query heads, KV heads, head_dim


class Case(NamedTuple):
    name: str
    native: Callable[[], object]
    torch: Callable[[], object]
    read: Callable[[], object] | None = None  # of the same bytes
    codes: Callable[[], object] | None = None  # the C kernel, of an int8 cache


def cases(dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    lengths = np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, ROWS).astype(np.int32)
    per_row = -(-LONGEST // BLOCK_SIZE)
    layers = [drawn(2, ROWS * per_row, BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(LAYERS)]
    tables = torch.randperm(ROWS * per_row, generator=generator).to(torch.int32).view(ROWS, per_row)
    yield Case("decode attention", *decodes(drawn(ROWS, HEADS, HEAD_DIM), layers, tables, lengths))

    yield from long_cases(drawn)
    yield from prompt_cases(drawn)

    sizes = [HEADS, KV_HEADS, KV_HEADS]
    queries, keys, values = drawn(ROWS, sum(sizes), HEAD_DIM).split(sizes, dim=1)
    # Rows are rotated again and again: with lengths that change, they would come to hold denormal numbers.
    angles = torch.rand(LONGEST, HEAD_DIM // 2, generator=generator)
    table, positions = torch.cat((angles.cos(), angles.sin()), dim=1), torch.arange(ROWS)
    weights = torch.ones(HEAD_DIM, dtype=dtype), torch.ones(HEAD_DIM, dtype=dtype)

    def rotation(function: Callable[..., object]) -> Callable[[], object]:
        rows = queries, keys, values, table, positions, positions
        return lambda: function(*rows, layers[0][0], layers[0][1], *weights, 1e-6, None)

    yield Case("rotation and cache write", rotation(rope_and_cache_native), rotation(rope_and_cache_cpu))

    x, residual, weight, both = drawn(ROWS, HIDDEN), drawn(ROWS, HIDDEN), drawn(HIDDEN), drawn(ROWS, 2 * INTERMEDIATE)
    yield Case(
        "norm and residual",
        lambda: rms_norm_native(x, weight, 1e-6, residual, 0.0),
        lambda: rms_norm_cpu(x, weight, 1e-6, residual, 0.0),
    )
    yield Case("activation", lambda: silu_and_mul_native(both), lambda: silu_and_mul_cpu(both))


def decodes(
    q: torch.Tensor, caches: Sequence[torch.Tensor], tables: torch.Tensor, lengths: np.ndarray
) -> Iterator[Callable[[], object]]:
    starts = np.arange(len(q) + 1, dtype=np.int32)
    step = AttentionMetadata(
        slot_mapping=torch.arange(len(q)), block_tables=tables, cu_seqlens_q=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lengths), max_seqlen_q=1, max_seq_len=int(lengths.max()), num_decodes=len(q),
        cu_seqlens_q_cpu=starts, seq_lens_cpu=lengths,
    )  # fmt: skip
    given = step, torch.empty_like(q), q.shape[2] ** -0.5, 0, 0.0, None
    return (over_layers(f, q, caches, given) for f in (paged_attention_native, paged_attention_cpu))


def long_cases(drawn: Callable[..., torch.Tensor]) -> Iterator[Case]:
    for (model, (heads, kv_heads, head_dim)), count in product(LONG_SHAPES.items(), (1, 4)):
        blocks = np.random.default_rng(0).permutation(count * LONG_CONTEXT // BLOCK_SIZE).astype(np.int32)
        tables = torch.from_numpy(blocks).view(count, -1)
        cache = drawn(2, len(blocks), BLOCK_SIZE, kv_heads, head_dim)
        caches = [cache.clone() for _ in range(LEAST_BYTES // cache.nbytes + 1)]
        words = cycle([cache.view(torch.int64) for cache in caches])
        lengths = np.full(count, LONG_CONTEXT, np.int32)
        rounded = [in_codes(cache) for cache in (*caches, *caches)]
        q, name = drawn(count, heads, head_dim), f"{count} of {LONG_CONTEXT} tokens, {model}"
        of_codes = next(decodes(q, rounded, tables, lengths))
        yield Case(name, *decodes(q, caches, tables, lengths), lambda words=words: next(words).sum(), of_codes)


def in_codes(cache: torch.Tensor) -> torch.Tensor:
    """Return keys and values [2, num_blocks, ...] as an int8 cache."""
    _, num_blocks, block_size, kv_heads, head_dim = cache.shape
    blocks = torch.empty(2, num_blocks, block_size * kv_heads * head_bytes(head_dim, INT8), dtype=INT8)
    codes = codes_of(blocks, block_size, kv_heads, head_dim)
    write_kv_cache(*cache.flatten(1, 2), torch.arange(num_blocks * block_size), *codes)
    return codes


def prompt_cases(drawn: Callable[..., torch.Tensor]) -> Iterator[Case]:
    for name, count, length in (("7 prompts of 300", 7, 300), ("a prompt of 2,048", 1, 2048)):
        per_prompt = -(-length // BLOCK_SIZE)
        bounds, lens = np.arange(count + 1, dtype=np.int32) * np.int32(length), np.full(count, length, np.int32)
        prompts = AttentionMetadata(
            slot_mapping=torch.arange(count * length), max_seqlen_q=length, max_seq_len=length, num_decodes=0,
            block_tables=torch.arange(count * per_prompt, dtype=torch.int32).view(count, per_prompt),
            cu_seqlens_q=torch.from_numpy(bounds), seq_lens=torch.from_numpy(lens),
            cu_seqlens_q_cpu=bounds, seq_lens_cpu=lens,
        )  # fmt: skip
        caches = [drawn(2, count * per_prompt, BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(LAYERS)]
        rows = drawn(count * length, HEADS, HEAD_DIM)
        given = prompts, torch.empty_like(rows), HEAD_DIM**-0.5, 0, 0.0, None
        yield Case(
            name, *(over_layers(f, rows, caches, given) for f in (paged_attention_native, paged_attention_cpu))
        )


def over_layers(
    function: Callable[..., object], rows: torch.Tensor, caches: Sequence[torch.Tensor], given: tuple[object, ...]
) -> Callable[[], object]:
    layer = cycle(caches)
    return lambda: function(rows, *next(layer), *given)


def microseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return round(1e6 * (time.perf_counter() - began), 1)


def main() -> None:
    study = Study("cpu_kernels", __doc__, "torch", "numpy")
    study.add_argument("--repeats", type=int, default=200)
    options = study.begin()
    torch.set_num_threads(1)
    results: dict[str, dict[str, dict[str, object]]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        if native_library(dtype) is None:
            raise SystemExit("there are no native kernels here: install gcc, or set CC")
        of_dtype = results[str(dtype).removeprefix("torch.")] = {}
        for case in cases(dtype):
            calls = {name: call for name, call in case._asdict().items() if callable(call)}
            runs = {name: lambda call=call: microseconds(call) for name, call in calls.items()}
            samples = in_turns(runs, options.repeats, warm_up=WARM_UP)
            medians = {name: statistics.median(taken) for name, taken in samples.items()}
            ratio = medians["torch"] / medians["native"]
            of_dtype[case.name] = {"median_us": medians, "torch_over_native": ratio}
            line = f"{dtype} {case.name}: {medians['native']:.0f} us, torch {medians['torch']:.0f}, {ratio:.1f} times"
            if case.read:
                line += f", {medians['read'] / medians['native']:.0%} of a plain read; int8 {medians['codes']:.0f}"
            print(line)
    study.save({"results": results, "weight_products": compare_products(max(options.repeats // 10, 1))})


if __name__ == "__main__":
    main()
