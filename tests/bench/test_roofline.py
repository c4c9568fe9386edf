"""The roofline against the figures derived by hand for the H200 (4.3 TB/s copy, 790 TFLOP/s bf16)."""

from __future__ import annotations

import pytest

from modelled.roofline import SHAPES, Device, decode_seconds, kv_bytes_per_token, prefill_seconds, weights_bytes

DECODE_MS = {  # by model, batch and context
    ("llama-3.1-8b", 1): {512: 3.51, 2048: 3.55, 8192: 3.74},
    ("llama-3.1-8b", 8): {512: 3.63, 2048: 4.00, 8192: 5.50},
    ("llama-3.1-8b", 32): {512: 4.03, 2048: 5.53, 8192: 11.5},
    ("llama-3.1-8b", 64): {512: 4.57, 2048: 7.56, 8192: 19.5},
    ("llama-3.1-8b", 128): {512: 5.64, 2048: 11.6, 8192: 35.6},
    ("llama-3.1-8b", 256): {512: 7.79, 2048: 19.8, 8192: 67.7},
    ("qwen3-0.6b", 1): {512: 0.29, 2048: 0.33, 8192: 0.50},
    ("qwen3-0.6b", 8): {512: 0.39, 2048: 0.72, 8192: 2.03},
    ("qwen3-0.6b", 32): {512: 0.73, 2048: 2.04, 8192: 7.28},
    ("qwen3-0.6b", 64): {512: 1.18, 2048: 3.80, 8192: 14.3},
    ("qwen3-0.6b", 128): {512: 2.08, 2048: 7.32, 8192: 28.3},
    ("qwen3-0.6b", 256): {512: 3.88, 2048: 14.4, 8192: 56.3},
}
PREFILL_MS = {
    "llama-3.1-8b": {512: 9.1, 2048: 37.6, 8192: 167},
    "qwen3-8b": {512: 9.1, 2048: 37.6, 8192: 169},
    "qwen3-0.6b": {512: 0.61, 2048: 2.89, 8192: 18.9},
}
WEIGHTS_GB = {"llama-3.1-8b": 15.01, "qwen3-8b": 15.14, "qwen3-0.6b": 1.19}
KV_KIB = {"llama-3.1-8b": 128, "qwen3-8b": 144, "qwen3-0.6b": 112}


@pytest.mark.parametrize(("name", "batch"), DECODE_MS)
def test_decode_step(name: str, batch: int) -> None:
    for context, milliseconds in DECODE_MS[name, batch].items():
        assert 1e3 * decode_seconds(SHAPES[name], batch, context) == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize("name", PREFILL_MS)
def test_prefill(name: str) -> None:
    for num_tokens, milliseconds in PREFILL_MS[name].items():
        assert 1e3 * prefill_seconds(SHAPES[name], [num_tokens]) == pytest.approx(milliseconds, rel=0.01)


@pytest.mark.parametrize("name", WEIGHTS_GB)
def test_sizes(name: str) -> None:
    assert weights_bytes(SHAPES[name]) / 1e9 == pytest.approx(WEIGHTS_GB[name], abs=0.006)
    assert kv_bytes_per_token(SHAPES[name]) == KV_KIB[name] * 1024


def test_cached_tokens_are_attended_to_but_not_computed() -> None:
    shape = SHAPES["llama-3.1-8b"]
    whole = prefill_seconds(shape, [2048])
    parts = prefill_seconds(shape, [1024]) + prefill_seconds(shape, [1024], num_cached=[1024])
    assert parts == pytest.approx(whole)


def test_a_large_batch_at_short_context_is_bound_by_arithmetic() -> None:
    shape = SHAPES["llama-3.1-8b"]
    fast_memory = Device(copy_bandwidth=1e18)
    assert decode_seconds(shape, 4096, 1, fast_memory) == pytest.approx(decode_seconds(shape, 4096, 1), rel=1e-6)
    assert decode_seconds(shape, 1, 1, fast_memory) < decode_seconds(shape, 1, 1)
