"""Compares what bound launches pass to compiled kernels with what triton-lang's own path passes, without a device.

    PYTHONPATH=kernels:tests python -m support.kernels.launch_comparison

Nothing is compiled: each specialisation gets a stand-in that notes its arguments.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tidewheel_kernels import AttentionMetadata
from tidewheel_kernels.launch_config import compile_target
from tidewheel_kernels.switches import Switch, tried

DEVICE, STREAM = 3, 77
METADATA = object()  # for hooks
ALIGNMENT = 16
LEAST_ADDRESS = 1 << 40  # no other number comes near
I32, I64, F32 = torch.int32, torch.int64, torch.float32
FP8 = torch.float8_e4m3fn
Call = partial[object]


class Recorder:
    """Launches so far, and how many of them came from triton-lang's own path."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.num_bound = 0
        self._functions = itertools.count(1)

    def compile(self, src: Any, *, options: dict[str, Any], **_: Any) -> Any:
        """Stand in for triton-lang's compiler, which is asked once for each specialisation."""
        from triton.backends.nvidia import driver

        function = next(self._functions)
        run: Any = driver.CudaLauncher.__new__(driver.CudaLauncher)
        sizes = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
        vars(run).update(dict.fromkeys(sizes, 0), num_ctas=1, launch=self._launch)
        vars(run).update(
            launch_cooperative_grid="cooperative", launch_pdl=("pdl", options["launch_pdl"]), gsan_enabled=False
        )
        if not hasattr(driver, "make_launcher"):  # 3.6 compiles a launcher for each signature
            run.arg_annotations, run.kernel_signature = ("annotations", function), ("signature", function)
        return SimpleNamespace(
            run=run, function=function, packed_metadata=("metadata", function),
            launch_metadata=lambda grid, stream, *arguments: METADATA,
        )  # fmt: skip

    def _launch(self, *arguments: Any) -> None:
        """Stand in for triton-lang's C launcher, to which hooks and their metadata make no difference."""
        if isinstance(arguments[-1], tuple):
            arguments = (*arguments[:-1], *arguments[-1])
        self.num_bound += not any(value is METADATA for value in arguments)
        self.launches.append(tuple(map(_plain, arguments)))


def _plain(argument: Any) -> Any:
    """Return a tensor's address, a descriptor's address and layout, and None for what serves hooks."""
    from triton.knobs import HookChain

    if argument is METADATA or isinstance(argument, HookChain):
        return None
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if hasattr(argument, "block_shape"):
        layout = (argument.shape, argument.strides, argument.block_shape)
        return argument.base.data_ptr(), *map(tuple, layout)
    return argument


@contextmanager
def recorded(*switches: Switch) -> Iterator[Recorder]:
    """Let launches on CPU tensors go to a recorder, with these switches alone; forget them afterwards."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    recorder = Recorder()
    active = SimpleNamespace(
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: STREAM if device == DEVICE else None,
        get_current_target=lambda: GPUTarget("cuda", compile_target.get(), 32),
    )
    before, token = driver._active, tried.set(frozenset(switches))
    _forget_launches()
    driver.set_active(active)
    try:
        with mock.patch("triton.compiler.compile", recorder.compile):
            yield recorder
    finally:
        driver._active = before
        tried.reset(token)
        _forget_launches()


def _forget_launches(*, of_triton: bool = True) -> None:
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("tidewheel_kernels.")]
    for value in [value for module in modules for value in vars(module).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()
        elif isinstance(value, JITFunction) and of_triton:
            value.device_caches.clear()


def tensor(draw: random.Random, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor that is aligned more often than not, with rows that may lie apart."""
    apart = draw.choice((0, 0, 0, 1, 8, 16)) if len(shape) > 1 else 0
    offset = draw.choice((0, 0, 0, 0, 1, 8))
    *rest, last = shape
    size = torch.Size((*rest, last + apart)).numel()
    memory = torch.empty(size + offset, dtype=dtype)[offset:]
    return memory.view(*rest, last + apart)[..., :last]


def drawn_scales(draw: random.Random, num_kv_heads: int) -> torch.Tensor | None:
    return tensor(draw, 2, num_kv_heads, dtype=F32) if draw.random() < 0.3 else None


def norm(draw: random.Random) -> Call:
    from tidewheel_kernels.norm.triton_kernels import rms_norm

    hidden, dtype = draw.choice((1, 24, 64, 1024)), draw.choice((torch.bfloat16, F32))
    x = tensor(draw, draw.choice((1, 3, 16)), hidden, dtype=dtype)
    residual = tensor(draw, *x.shape, dtype=dtype) if draw.random() < 0.7 else None
    weight = tensor(draw, hidden, dtype=draw.choice((dtype, F32)))
    return partial(rms_norm, x, weight, draw.choice((1e-5, 1e-6)), residual, draw.choice((0.0, 1.0)))


def rounding(draw: random.Random) -> Call:
    from tidewheel_kernels.scaled_linear.triton_kernels import quantize_rows, scaled_linear

    dtype = draw.choice((torch.bfloat16, F32))
    x = tensor(draw, draw.choice((1, 3, 16)), draw.choice((16, 64, 1024)), dtype=dtype)
    if draw.random() < 0.5:
        return partial(quantize_rows, x)
    weight = torch.ones(draw.choice((8, 24, 1024)), x.shape[1], dtype=torch.int8)
    bias = tensor(draw, len(weight), dtype=dtype) if draw.random() < 0.5 else None
    return partial(scaled_linear, x, weight, tensor(draw, len(weight), 1, dtype=torch.float16), bias)


def activation(draw: random.Random) -> Call:
    from tidewheel_kernels.activation.triton_kernels import silu_and_mul

    return partial(silu_and_mul, tensor(draw, draw.choice((1, 3)), 2 * draw.choice((1, 24, 3072))))


def rope(draw: random.Random) -> Call:
    from tidewheel_kernels.rope.triton_kernels import rope_and_cache

    num_tokens, num_kv_heads, head_dim = draw.choice((1, 5)), draw.choice((1, 8)), draw.choice((80, 128))
    q = tensor(draw, num_tokens, num_kv_heads * draw.choice((1, 4)), head_dim)
    k, v = (tensor(draw, num_tokens, num_kv_heads, head_dim) for _ in range(2))
    k_cache, v_cache = (tensor(draw, 4, draw.choice((16, 64)), num_kv_heads, head_dim) for _ in range(2))
    positions, slots = tensor(draw, num_tokens, dtype=draw.choice((I32, I64))), tensor(draw, num_tokens, dtype=I64)
    cos_sin = tensor(draw, 16, draw.choice((32, head_dim)), dtype=F32)
    weights = draw.choice(([None, None], [tensor(draw, head_dim), tensor(draw, head_dim)]))
    scales = drawn_scales(draw, num_kv_heads)
    if scales is not None:
        k_cache, v_cache = k_cache.to(FP8), v_cache.to(FP8)
    return partial(rope_and_cache, q, k, v, cos_sin, positions, slots, k_cache, v_cache, *weights, 1e-6, scales)


def product(draw: random.Random) -> Call:
    from tidewheel_kernels.invariant_linear.triton_kernels import invariant_linear

    dtype, num_rows = draw.choice((torch.bfloat16, F32)), draw.choice((1, 3, 16, 3000))
    x, outputs = tensor(draw, num_rows, draw.choice((24, 64, 1024)), dtype=dtype), draw.choice((1, 24, 256))
    weight = torch.empty(outputs, x.shape[1], dtype=dtype)
    return partial(invariant_linear, x, weight, tensor(draw, outputs, dtype=dtype) if draw.random() < 0.3 else None)


def grouped(draw: random.Random) -> Call:
    from tidewheel_kernels.grouped_linear.reference import quantize_groups
    from tidewheel_kernels.grouped_linear.triton_kernels import grouped_linear

    dtype, num_rows = draw.choice((torch.bfloat16, F32)), draw.choice((1, 3, 16, 3000))
    x, outputs = tensor(draw, num_rows, draw.choice((128, 1024)), dtype=dtype), draw.choice((1, 24, 256))
    weights = quantize_groups(torch.ones(outputs, x.shape[1]), draw.choice((4, 8)), draw.choice((32, 128)))
    return partial(grouped_linear, x, weights, tensor(draw, outputs, dtype=dtype) if draw.random() < 0.3 else None)


def attention(draw: random.Random) -> Call:
    from tidewheel_kernels.attention.triton_kernels import invariant_attention, paged_attention

    num_decodes, num_prompts = draw.choice(((0, 1), (0, 3), (1, 0), (40, 0), (2, 2), (40, 1)))
    num_kv_heads, head_dim, block_size = draw.choice((1, 8)), draw.choice((80, 128)), draw.choice((16, 64))
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, F32))
    num_seqs = num_decodes + num_prompts
    q = tensor(draw, num_decodes + 7 * num_prompts, num_kv_heads * draw.choice((1, 2)), head_dim, dtype=dtype)
    scales = drawn_scales(draw, num_kv_heads)
    of_cache = dtype if scales is None else FP8
    k_cache, v_cache = torch.empty(2, 4, block_size, num_kv_heads, head_dim, dtype=of_cache)
    max_seq_len = draw.choice((64, 4096))
    meta = AttentionMetadata(
        tensor(draw, q.shape[0], dtype=I64), tensor(draw, num_seqs, max_seq_len // block_size, dtype=I32),
        tensor(draw, num_seqs + 1, dtype=I32), tensor(draw, num_seqs, dtype=I32), 7, max_seq_len, num_decodes,
    )  # fmt: skip
    window, cap = draw.choice((0, 1, 512)), draw.choice((0.0, 30.0))
    out = tensor(draw, *q.shape, dtype=dtype)
    attend = draw.choice((paged_attention, paged_attention, invariant_attention))
    return partial(attend, q, k_cache, v_cache, meta, out, 0.1, window, cap, scales)


OPERATIONS = {
    "norm": norm, "rounding": rounding, "activation": activation, "rope": rope, "product": product,
    "grouped": grouped, "attention": attention,
}  # fmt: skip


def compare(name: str, seed: int, num_calls: int = 40) -> tuple[int, int]:
    """Return (launches, bound ones) of random calls, each made twice and then in triton-lang's way.

    Odd seeds launch small kernels early. Raise AssertionError if the ways differ.
    """
    draw = random.Random(f"{name} {seed}")
    calls = [OPERATIONS[name](draw) for _ in range(num_calls)]
    with recorded(*["dependent_launch"] * (seed % 2)) as recorder:
        bound = [_launches(recorder, call) for _ in range(2) for call in calls]
        num_bound = recorder.num_bound
        _forget_launches(of_triton=False)
        with mock.patch.dict(os.environ, TIDEWHEEL_LAUNCH="triton"):
            plain = [_launches(recorder, call) for call in calls]
        assert recorder.num_bound == num_bound, "the variable did not turn bound launches off"
    for number, (one, other) in enumerate(zip(bound, plain * 2, strict=True)):
        assert one == other, f"{name}, seed {seed}, call {number}: {one}, triton-lang: {other}"
    return sum(map(len, bound)), num_bound


def _launches(recorder: Recorder, call: Call) -> list[tuple[Any, ...]]:
    """Return what the call launched; of tensors that it made, only the alignment is of interest."""
    from tidewheel_kernels.attention import triton_splits

    triton_splits._plans.clear()  # else only the first of equal calls makes one
    before = len(recorder.launches)
    call()
    inputs = {value.data_ptr() for value in _tensors(call.args)}
    return [
        tuple(
            value % ALIGNMENT if isinstance(value, int) and value > LEAST_ADDRESS and value not in inputs else value
            for value in launch
        )
        for launch in recorder.launches[before:]
    ]


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, AttentionMetadata):
            yield from _tensors(vars(value).values())
        elif isinstance(value, tuple):
            yield from _tensors(value)


def main() -> None:
    for name in OPERATIONS:
        num_launches, num_bound = map(sum, zip(*(compare(name, seed) for seed in range(5)), strict=True))
        print(f"{name:12} {num_launches} launches, {num_bound} bound: as triton-lang's own")


if __name__ == "__main__":
    main()
