"""A cache of 8 bits: its scales follow from the model, and its answers are close to those of the model's dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from support.models import tiny_models
from support.runner.step_loop import StepLoop, poison, request
from tidewheel.config import EngineConfig
from tidewheel.models.causal_lm import ForwardInput
from tidewheel.models.trial_prompt import one_sequence, random_tokens
from tidewheel.runner.kv_tensors import HEADROOM, CacheLayout, KVTensors, scales_of_largest
from tidewheel.runner.loading import load_parts
from tidewheel.runner.model_runner import ModelRunner
from tidewheel_kernels import FP8

CPU = torch.device("cpu")
LARGEST = torch.finfo(FP8).max
NUM_TOKENS = 60


def fp8(config: EngineConfig, **changes: object) -> EngineConfig:
    return dataclasses.replace(config, kv_cache_dtype="fp8_e4m3", **changes)


def layout(config: EngineConfig) -> CacheLayout:
    return load_parts(config, lambda stage, fraction: None).layout


def test_scales_are_powers_of_two_with_room_above_what_was_seen() -> None:
    largest = torch.tensor([1e-30, 0.5, 1.0, 3.0, 447.9, 448.0, 1e5, 1e30])
    scales = scales_of_largest(largest)
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    kept = scales[1:-1] * LARGEST / largest[1:-1]
    assert ((kept >= HEADROOM) & (kept <= 2 * HEADROOM)).all()
    assert scales[0] == 2.0**-14 and scales[-1] == 2.0**15


def test_heads_without_numbers_have_a_scale_of_one() -> None:
    assert scales_of_largest(torch.tensor([0.0, float("nan"), float("inf")])).tolist() == [1.0, 1.0, 1.0]


def test_scales_follow_from_the_model_alone(config: EngineConfig) -> None:
    scales = layout(fp8(config)).scales
    assert scales is not None and scales.shape == (2, 2, 2)
    other = fp8(config, block_size=64, num_blocks=32, max_num_seqs=2, max_num_batched_tokens=16, seed=7)
    assert torch.equal(scales, layout(other).scales)
    assert layout(config).scales is None


def test_the_cache_holds_twice_as_much(config: EngineConfig) -> None:
    wide, narrow = (
        ModelRunner.load(dataclasses.replace(made, dtype="bfloat16", num_blocks=None, kv_cache_memory_mb=1))
        for made in (config, fp8(config))
    )
    assert narrow.info.num_blocks == 2 * wide.info.num_blocks
    assert narrow.info.kv_cache_bytes == wide.info.kv_cache_bytes == 1 << 20
    assert (wide.info.kv_cache_dtype, narrow.info.kv_cache_dtype) == ("", "float8_e4m3fn")
    assert narrow.info.activation_bytes == wide.info.activation_bytes


@pytest.mark.parametrize("make", [tiny_models.llama, tiny_models.qwen3, tiny_models.gemma2, tiny_models.gpt2])
def test_logits_are_close(tmp_path: Path, make: Callable[[], PreTrainedModel]) -> None:
    """On the native decoder and through transformers."""
    tiny_models.save(make, tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", num_threads=1)
    logits = []
    for settings in (config, fp8(config)):
        parts = load_parts(settings, lambda stage, fraction: None)
        kv = KVTensors(parts.layout, 4, CPU)
        tokens, positions = random_tokens(NUM_TOKENS, tiny_models.VOCAB_SIZE, CPU), torch.arange(NUM_TOKENS)
        with torch.inference_mode():
            logits.append(
                parts.model.forward(
                    ForwardInput(tokens, positions, one_sequence(NUM_TOKENS, 16, CPU), kv.layers, positions)
                )
            )
    exact, rounded = logits
    difference = ((rounded - exact).square().mean() / exact.square().mean()).sqrt()
    assert 0 < difference < 0.15


def test_values_beyond_the_range_saturate(config: EngineConfig) -> None:
    """Scales that are far too small: wrong tokens, but tokens."""
    runner = ModelRunner.load(fp8(config))
    scales = [layer.scales for layer in runner.kv.layers]
    for of_layer in scales:
        assert of_layer is not None
        with torch.inference_mode():
            of_layer.fill_(2.0**-14)
    prompts = tiny_models.prompts(2, 20, 40)
    tokens = StepLoop(runner).run([request(f"r{i}", prompt, 8) for i, prompt in enumerate(prompts)])
    assert all(len(of_request) == 8 and min(of_request) >= 0 for of_request in tokens)
    assert float(runner.kv.layers[0].values.float().abs().max()) == LARGEST


def test_what_ran_before_changes_nothing(config: EngineConfig) -> None:
    runner = ModelRunner.load(fp8(config))
    poison(runner)
    first, *others = tiny_models.prompts(5, 30, 60)
    alone = StepLoop(runner, prefix_caching=False).run([request("a", first, 12)])
    StepLoop(runner, prefix_caching=False).run([request(f"r{i}", prompt, 12) for i, prompt in enumerate(others)])
    assert StepLoop(runner, prefix_caching=False).run([request("b", first, 12)]) == alone
