"""Operations on rows of tokens or logits, and the bytes each must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, silu

from gpu.measurements import OURS
from gpu.timing import Call, KernelCase, Maker
from modelled.roofline import Shape
from tidewheel_kernels import (
    SamplingTensors,
    compute_logprobs,
    invariant_linear,
    rms_norm,
    rope_and_cache,
    sample,
    silu_and_mul,
)
from tidewheel_kernels.grouped_linear import GroupedWeights, grouped_linear, signed_by_output

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EPS = 1e-6
BLOCK_SIZE = 64
CONTEXT = 8192
FEW_ROWS = 128  # products of more are bound by arithmetic


def _random(*sizes: int, device: torch.device) -> torch.Tensor:
    return torch.randn(sizes, device=device, dtype=torch.bfloat16)


def residual_norm(shape: Shape, num_tokens: int) -> KernelCase:
    def make(device: torch.device) -> Call:
        x, residual = (_random(num_tokens, shape.hidden, device=device) for _ in range(2))
        return partial(rms_norm, x, _random(shape.hidden, device=device), EPS, residual)

    def unfused(device: torch.device) -> Call:
        x, residual = (_random(num_tokens, shape.hidden, device=device) for _ in range(2))
        weight = _random(shape.hidden, device=device)
        return lambda: torch.rms_norm(x + residual, weight.shape, weight, EPS)

    case = f"{num_tokens} tokens, hidden {shape.hidden}"
    return KernelCase("residual RMSNorm", case, 4 * 2 * num_tokens * shape.hidden, {OURS: make, "torch": unfused})


def gated_activation(shape: Shape, num_tokens: int) -> KernelCase:
    def make(device: torch.device) -> Call:
        return partial(silu_and_mul, _random(num_tokens, 2 * shape.intermediate, device=device))

    def unfused(device: torch.device) -> Call:
        gate, up = _random(num_tokens, 2 * shape.intermediate, device=device).chunk(2, dim=-1)
        return lambda: silu(gate) * up

    case = f"{num_tokens} tokens, intermediate {shape.intermediate}"
    return KernelCase("SiLU-mul", case, 3 * 2 * num_tokens * shape.intermediate, {OURS: make, "torch": unfused})


def by_cublaslt(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply with cuBLASLt; a graph keeps what is chosen at its capture."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return linear(x, weight)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def products(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of a model's matrix products."""
    queries, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "qkv": (shape.hidden, queries + 2 * kv),
        "o": (queries, shape.hidden),
        "gate-up": (shape.hidden, 2 * shape.intermediate),
        "down": (shape.intermediate, shape.hidden),
        "head": (shape.hidden, shape.vocab),
    }


def product(name: str, num_tokens: int, inputs: int, outputs: int, makers: Mapping[str, Multiply]) -> KernelCase:
    """Return a product, which few tokens bind by bandwidth and more by arithmetic."""

    def maker(multiply: Multiply) -> Maker:
        return lambda device: partial(
            multiply, _random(num_tokens, inputs, device=device), _random(outputs, inputs, device=device)
        )

    moved = 2 * (num_tokens * inputs + outputs * inputs + num_tokens * outputs)
    flops = 2.0 * num_tokens * inputs * outputs if num_tokens > FEW_ROWS else 0.0
    made = {who: maker(multiply) for who, multiply in makers.items()}
    return KernelCase(name, f"{num_tokens} tokens, {outputs} x {inputs}", moved, made, flops)


def down_product(shape: Shape, num_tokens: int) -> KernelCase:
    """Multiply as with `deterministic`, beside cuBLAS."""
    makers = {OURS: invariant_linear, "torch": linear}
    return product("invariant product", num_tokens, shape.intermediate, shape.hidden, makers)


def int8_product(shape: Shape, num_tokens: int) -> KernelCase:
    """Multiply rows rounded to int8, beside 8-bit weights alone and cuBLAS's 16 bits."""
    sizes = shape.hidden, shape.intermediate

    def maker(held: Callable[[GroupedWeights], GroupedWeights]) -> Maker:
        def make(device: torch.device) -> Call:
            codes = torch.randint(0, 256, sizes, dtype=torch.uint8, device=device)
            scales = torch.ones(sizes[0], sizes[1] // 32, dtype=torch.float16, device=device)
            weights = held(GroupedWeights(codes, scales, None, 8))
            return partial(grouped_linear, _random(num_tokens, sizes[1], device=device), weights)

        return make

    case = product("int8 product", num_tokens, shape.intermediate, shape.hidden, {"torch": linear})
    makers = {OURS: maker(signed_by_output), "8-bit weights": maker(lambda weights: weights), **case.makers}
    return replace(case, makers=makers)


def norm_rope_write(shape: Shape, num_tokens: int) -> KernelCase:
    """Work on views of a fused QKV output: q, k and v are read, q and k written, k and v written to the cache."""
    q_heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim

    def make(device: torch.device) -> Call:
        qkv = _random(num_tokens, q_heads + 2 * kv_heads, dim, device=device)
        q, k, v = qkv.split([q_heads, kv_heads, kv_heads], dim=1)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        k_cache, v_cache = (_random(num_blocks, BLOCK_SIZE, kv_heads, dim, device=device) for _ in range(2))
        angles = torch.randn(CONTEXT, dim, device=device)
        positions = torch.arange(num_tokens, device=device) % CONTEXT
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
        weights: dict[str, torch.Tensor] = {}
        if shape.qk_norm:
            weights = {name: _random(dim, device=device) for name in ("q_norm_weight", "k_norm_weight")}
        return partial(rope_and_cache, q, k, v, angles, positions, slots, k_cache, v_cache, eps=EPS, **weights)

    moved = 2 * num_tokens * dim * (2 * q_heads + 5 * kv_heads) + 4 * num_tokens * dim
    name = "qk-norm, RoPE, KV write" if shape.qk_norm else "RoPE, KV write"
    return KernelCase(name, f"{num_tokens} tokens, {q_heads}:{kv_heads} heads", moved, {OURS: make})


SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "top-p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "top-k 50, top-p 0.9": {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
}


def sampling(batch: int, vocab: int, sampler: str) -> KernelCase:
    values = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, **SAMPLERS[sampler]}

    def make(device: torch.device) -> Call:
        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((batch,), value, dtype=dtype, device=device)

        tensors = SamplingTensors(
            temperature=column(values["temperature"], torch.float32),
            top_k=column(values["top_k"], torch.int32),
            top_p=column(values["top_p"], torch.float32),
            min_p=column(0.0, torch.float32),
            any_sampled=values["temperature"] > 0,
            any_top_k=values["top_k"] > 0,
            any_top_p=values["top_p"] < 1,
            any_min_p=False,
        )
        logits = 4.0 * _random(batch, vocab, device=device)
        return partial(sample, logits, tensors, torch.rand(batch, device=device))

    def by_sorting(device: torch.device) -> Call:
        return partial(_sample_by_sorting, 4.0 * _random(batch, vocab, device=device), values["top_p"])

    makers = {OURS: make, "torch sort": by_sorting} if sampler.startswith("top-p") else {OURS: make}
    return KernelCase(f"sample, {sampler}", f"batch {batch}, vocabulary {vocab}", 2 * batch * vocab, makers)


def _sample_by_sorting(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    probabilities, order = torch.softmax(logits.float() / 0.6, dim=-1).sort(dim=-1, descending=True)
    kept = probabilities.where(probabilities.cumsum(dim=-1) - probabilities < top_p, 0.0)
    drawn = (kept / torch.empty_like(kept).exponential_()).argmax(dim=-1, keepdim=True)
    return order.gather(-1, drawn)


def log_probabilities(batch: int, vocab: int, num_top: int) -> KernelCase:
    def make(device: torch.device) -> Call:
        logits = 4.0 * _random(batch, vocab, device=device)
        return partial(compute_logprobs, logits, torch.zeros(batch, dtype=torch.int64, device=device), num_top)

    def whole(device: torch.device) -> Call:
        logits = 4.0 * _random(batch, vocab, device=device)
        return lambda: torch.log_softmax(logits.float(), dim=-1).topk(max(num_top, 1), dim=-1)

    case = f"batch {batch}, vocabulary {vocab}, top {num_top}"
    return KernelCase("logprobs", case, 2 * batch * vocab, {OURS: make, "torch log_softmax": whole})
