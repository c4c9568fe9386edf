"""Each operation once at serving sizes, beside its reference: the first thing to run on a new device.

A GPU benchmark runs each test in a process of its own, so an illegal access in one hides no other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch

from support.kernels.kernel_harness import NAN, RATIO, assert_close, paged_batch
from support.kernels.sampling_rows import GREEDY, Row, possible_draws, tensors
from tidewheel.models.causal_lm import ModelShape
from tidewheel.runner.accelerator import CudaAccelerator
from tidewheel.runner.host_tier import HostBlocks
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel_kernels import copy_blocks, rms_norm, silu_and_mul
from tidewheel_kernels.attention.reference import paged_attention_reference
from tidewheel_kernels.attention.triton_kernels import paged_attention
from tidewheel_kernels.kv_cache.triton_kernels import copy_blocks as copy_blocks_triton
from tidewheel_kernels.sampling.triton_kernels import sample

BF16 = torch.bfloat16
HEADS = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "block_size": 64, "dtype": BF16}
FEW_HEADS = {**HEADS, "num_kv_heads": 1, "group": 2, "head_dim": 64, "dtype": torch.float32}
VOCAB = 151_936
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def sizes(device: str) -> dict[str, object]:
    """Heads as of an 8B model; fewer, in float32, for the interpreter, which has no products of bfloat16."""
    return {**(HEADS if device == "cuda" else FEW_HEADS), "device": device}


def check_attention(lengths: list[tuple[int, int]], sizes: dict[str, object]) -> None:
    batch = paged_batch(lengths, **sizes)
    ours, reference = torch.full_like(batch.q, NAN), torch.full_like(batch.q, NAN)
    scale = batch.q.shape[-1] ** -0.5
    paged_attention(*batch, ours, scale, 0, 0.0, None)
    paged_attention_reference(*batch, reference, scale, 0, 0.0, None)
    assert_close("attention", reference, ours, 2 * RATIO[batch.q.dtype])


def test_copies_of_blocks(device: str) -> None:
    cache = torch.randn(4, 8, 64, device=device).to(BF16)
    source, target = (torch.tensor(ids, device=device) for ids in ([0, 5, 2], [7, 1, 3]))
    expected = cache.clone()
    expected[:, target] = expected[:, source]
    copy_blocks_triton(cache, source, target)
    assert torch.equal(cache, expected)


def test_prompt_attention(sizes: dict[str, object]) -> None:
    check_attention([(63, 63), (17, 150)], sizes)


def test_long_prompt_attention(sizes: dict[str, object], device: str) -> None:
    length = 2048 if device == "cuda" else 130
    check_attention([(length, length)], sizes)


def test_decode_attention_without_splits(sizes: dict[str, object], device: str) -> None:
    check_attention([(1, 70)] * (256 if device == "cuda" else 3), sizes)


def test_decode_attention_with_splits(sizes: dict[str, object], device: str) -> None:
    check_attention([(1, 8192 if device == "cuda" else 700), (1, 33)], sizes)


def test_a_mixed_step(sizes: dict[str, object]) -> None:
    check_attention([(1, 33), (1, 300), (20, 37), (50, 83)], sizes)


def test_sampling_from_a_whole_vocabulary(device: str) -> None:
    rows = [GREEDY, Row(), Row(temperature=0.7, top_p=0.9), Row(top_k=50, min_p=0.02)]
    generator = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(len(rows), VOCAB if device == "cuda" else 3000, generator=generator)
    uniform = torch.rand(len(rows), generator=generator)
    got = sample(logits.to(device), tensors(rows, device), uniform.to(device)).tolist()
    for row, values, draw, token in zip(rows, logits, uniform.tolist(), got, strict=True):
        assert token in possible_draws(values, row, draw)


def some_operations(device: str) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    x, residual, wide = (torch.randn(33, size, generator=generator).to(device, BF16) for size in (256, 256, 512))
    weight = torch.ones(256, device=device, dtype=BF16)
    cache = torch.arange(4 * 8 * 64, device=device).view(4, 8, 64)
    source, target = (torch.tensor(ids, device=device) for ids in ([0, 5], [7, 1]))
    return {
        "rms_norm": lambda: rms_norm(x.clone(), weight, 1e-6, residual.clone()),
        "silu_and_mul": lambda: silu_and_mul(wide),
        "copy_blocks": lambda: (copy_blocks(caches := cache.clone(), source, target), caches)[1],
    }


def forget_launches() -> None:
    """Drop bound launches: each decides when it is made how it starts its kernel."""
    from support.kernels.launch_comparison import _forget_launches

    _forget_launches(of_triton=False)


@needs_cuda
@pytest.mark.gpu
def test_bound_launches_equal_those_of_triton_lang() -> None:
    operations = some_operations("cuda")
    results: list[list[torch.Tensor]] = []
    for launch in ("", "", "triton"):  # the first launch of a kernel goes through triton-lang anyway
        if launch:
            forget_launches()
        with mock.patch.dict(os.environ, TIDEWHEEL_LAUNCH=launch):
            outputs = [operation() for operation in operations.values()]
        results.append([t for output in outputs for t in (output if isinstance(output, tuple) else (output,))])
    first, bound, through_triton = results
    assert all(map(torch.equal, bound, through_triton))
    assert all(map(torch.equal, first, bound))


@needs_cuda
@pytest.mark.gpu
def test_a_capture_replays_on_other_inputs() -> None:
    inputs = torch.randn(16, 512, device="cuda").to(BF16)
    captured = CudaAccelerator(torch.device("cuda", 0)).graph_pool().capture(lambda: silu_and_mul(inputs))
    inputs.copy_(torch.randn(16, 512, device="cuda"))
    captured.graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.output, silu_and_mul(inputs))


def test_swapped_blocks_come_back() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = ModelShape(num_layers=2, num_kv_heads=2, head_dim=16, vocab_size=64, hidden_size=64, intermediate_size=64)
    kv = KVTensors(CacheLayout(shape, 16, BF16), 8, device)
    kv.blocks.copy_(torch.randn(kv.blocks.shape))
    before, host = kv.blocks.clone(), HostBlocks(kv, 4)
    blocks, slots = np.array([6, 1, 3], dtype=np.int32), np.array([2, 0, 3], dtype=np.int32)
    host.write_out(blocks, slots)
    kv.blocks[torch.from_numpy(blocks).long().to(device)] = NAN
    host.read_in(slots, blocks)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(kv.blocks, before)
