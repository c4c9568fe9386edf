"""How many blocks there are, and that a copied block is copied in every layer."""

from __future__ import annotations

import dataclasses
import os
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import ModelShape
from tidewheel.runner import loading
from tidewheel.runner.host_memory import MemoryClaim, SpareMemory, resident_bytes
from tidewheel.runner.kv_tensors import (
    CacheLayout,
    KVTensors,
    MemoryBudget,
    decide_size,
    limited_budget,
)
from tidewheel.settings import GIB, MIB
from tidewheel_kernels.kv_cache.codes import scales_behind

SHAPE = ModelShape(num_layers=2, num_kv_heads=3, head_dim=8, vocab_size=10, hidden_size=24, intermediate_size=48)
LAYOUT = CacheLayout(SHAPE, 16, torch.float32)
CPU = torch.device("cpu")


def test_bytes_of_a_block() -> None:
    assert LAYOUT.block_bytes == 2 * 2 * 16 * 3 * 8 * 4
    assert KVTensors(LAYOUT, 5, CPU).num_bytes == 5 * LAYOUT.block_bytes


def test_bytes_of_a_block_of_codes_and_scales() -> None:
    layout = LAYOUT._replace(dtype=torch.int8)
    assert layout.block_bytes == 2 * 2 * 16 * 3 * (8 + 4)
    kv = KVTensors(layout, 5, CPU)
    assert kv.num_bytes == 5 * layout.block_bytes and kv.blocks.shape == (5, 4, 16 * 3 * (8 + 4))


def test_the_budget_decides_unless_the_setting_does() -> None:
    budget = MemoryBudget(10 * LAYOUT.block_bytes + 1, "kv_cache_memory_mb 1", "kv_cache_memory_mb")
    assert decide_size(None, budget, LAYOUT, 160).num_blocks == 10
    assert decide_size(4, budget, LAYOUT, 64).num_blocks == 4


def test_a_cache_too_small_for_one_request_names_the_largest_that_fits() -> None:
    budget = MemoryBudget(10 * LAYOUT.block_bytes, "kv_cache_memory_mb 1", "kv_cache_memory_mb")
    with pytest.raises(ConfigError, match=r"kv_cache_memory_mb 1 .* set max_model_len to at most 160") as caught:
        decide_size(None, budget, LAYOUT, 161)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"num_blocks 3 .* at most 48, or raise num_blocks"):
        decide_size(3, budget, LAYOUT, 64)


@pytest.mark.parametrize(
    ("fraction", "left_mib", "max_model_len", "advice"),
    [
        (0.5, 0, 16, "raise gpu_memory_utilization to at least 0.51"),
        (0.5, -100, 16, "raise gpu_memory_utilization to at least 0.61"),
        (0.9, 10, 1 << 20, "set max_model_len to at most 27296"),
        (0.5, 10, 1 << 16, "set max_model_len to at most 27296, or raise gpu_memory_utilization to at least 0.52"),
        (0.9, -200, 16, "use a larger GPU"),
    ],
)
def test_what_would_fit_on_a_gpu_is_said(fraction: float, left_mib: int, max_model_len: int, advice: str) -> None:
    """Of 1,000 MiB; a block of 16 tokens takes 6 KiB."""
    budget = MemoryBudget(left_mib * MIB, "S", "gpu_memory_utilization", 1000 * MIB, fraction)
    with pytest.raises(ConfigError) as caught:
        decide_size(None, budget, LAYOUT, max_model_len)
    assert f" tokens: {advice} (" in str(caught.value)


def test_the_advice_is_enough() -> None:
    budget = MemoryBudget(10 * MIB, "S", "gpu_memory_utilization", 1000 * MIB, 0.5)
    least = budget.least_setting(123 * MIB)
    assert least is not None
    assert 123 <= 10 + 1000 * (least - 0.5) < 123 + 10


def test_no_memory_left_is_no_negative_number() -> None:
    with pytest.raises(ConfigError, match="a KV cache of 0 tokens"):
        decide_size(None, MemoryBudget(-5, "gpu_memory_utilization 0.1", "gpu_memory_utilization"), LAYOUT, 16)


def test_more_blocks_than_there_is_memory_for_are_refused_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*size: int, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (MIB, 10 * MIB))
    budget = MemoryBudget(MIB, "S", "gpu_memory_utilization", 10 * MIB, 0.5)
    with pytest.raises(ConfigError) as caught:
        loading._allocate(LAYOUT, 1000, torch.device("cuda", 0), budget)
    assert str(caught.value) == (
        "a KV cache of 5 MiB (1000 blocks) cannot be allocated: at most 170 blocks are free; "
        "lower num_blocks or gpu_memory_utilization"
    )


def cpu_budget(
    config: EngineConfig, spare: SpareMemory, layout: CacheLayout = LAYOUT, context: int = 64
) -> MemoryBudget:
    """Return the budget of a cache for requests of `context` tokens, where a process has memory to spare."""
    claim = mock.create_autospec(MemoryClaim)
    claim.spare.return_value = spare
    return loading.cache_budget(config, layout, context, {}, CPU, claim)


def test_a_cache_on_a_cpu_takes_half_of_what_is_free_and_no_more_than_requests_can_fill() -> None:
    config = EngineConfig(model="m", max_num_seqs=4)
    context = GIB // 4 // LAYOUT.block_bytes * LAYOUT.block_size  # of a request that takes 0.25 GiB
    half = cpu_budget(config, SpareMemory(10 * GIB, 1), context=20 * context)
    assert (half.bytes, half.source) == (5 * GIB, "half of the 10.0 GiB of memory to spare")
    assert "for each of 2 engines" in cpu_budget(config, SpareMemory(10 * GIB, 2), context=20 * context).source
    full = cpu_budget(config, SpareMemory(10 * GIB, 1), context=context)
    assert full.bytes == 4 * context // LAYOUT.block_size * LAYOUT.block_bytes < 5 * GIB
    assert full.source == "all that max_num_seqs 4 can use"
    assert cpu_budget(config, SpareMemory(10 * GIB, 1)).bytes == 512 * MIB  # room for cached prompts
    explicit = dataclasses.replace(config, kv_cache_memory_mb=7)
    assert cpu_budget(explicit, SpareMemory(10 * GIB, 1)).bytes == 7 * MIB


@pytest.mark.parametrize(("setting", "left"), [(None, GIB - loading.FRONT_END_BYTES), (7, GIB)])
def test_an_automatic_cache_leaves_memory_to_the_second_front_end(
    monkeypatch: pytest.MonkeyPatch, setting: int | None, left: int
) -> None:
    monkeypatch.setattr(loading, "available_host_bytes", lambda: GIB)
    claim = mock.create_autospec(MemoryClaim)
    claim.spare.return_value = SpareMemory(GIB, 1)
    loading.cache_budget(EngineConfig(model="m", kv_cache_memory_mb=setting), LAYOUT, 64, {"weights": 5}, CPU, claim)
    claim.spare.assert_called_once_with(left, 5)


def test_a_limit_bounds_weights_steps_and_cache_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_host_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(loading, "total_host_bytes", lambda: 10 * GIB)

    def budget(free: int = 9 * GIB, **settings: Any) -> MemoryBudget:
        claim = mock.create_autospec(MemoryClaim, base=GIB)
        claim.spare.return_value = SpareMemory(free, 1)
        config = EngineConfig(model="m", **settings)
        return loading.cache_budget(config, LAYOUT, 1 << 40, {"weights": GIB}, CPU, claim)

    by_share = budget(device_memory_share=0.5)
    assert by_share.bytes == 3 * GIB
    assert by_share.source == "device_memory_share 0.5 (5.0 GiB, 2.0 GiB of them beside the cache)"
    assert by_share.least_setting(4 * GIB) == 0.6 and by_share.least_setting(10 * GIB) is None
    of_ranks = budget(device_memory_share=0.8, tensor_parallel_size=2)
    assert of_ranks.bytes == 2 * GIB and of_ranks.least_setting(5 * GIB // 2) == pytest.approx(0.9, abs=0.011)
    scarce = budget(GIB, device_memory_share=0.5)
    assert (scarce.bytes, scarce.source, scarce.least_setting(2 * GIB)) == (
        GIB, "the 1.0 GiB of memory to spare", None,
    )  # fmt: skip
    assert budget(device_memory_share=0.5, kv_cache_memory_mb=7).source == "kv_cache_memory_mb 7"


def test_a_limit_that_holds_no_request_says_which_would() -> None:
    with pytest.raises(ConfigError) as caught:
        decide_size(None, limited_budget(0.01, 1000 * MIB, 10 * MIB, GIB), LAYOUT, 1024)
    assert str(caught.value) == (
        "max_model_len is 1024, but device_memory_share 0.01 (10 MiB, 10 MiB of them beside the cache) gives a KV "
        "cache of 0 tokens: raise device_memory_share to at least 0.02 (64 blocks of 16 tokens need 1 MiB)"
    )


QWEN = ModelShape(28, 8, 128, 151_936, 1024, 3072)  # Qwen3-0.6B
LLAMA = ModelShape(16, 8, 64, 128_256, 2048, 8192)  # Llama-3.2-1B


@pytest.mark.parametrize(
    ("shape", "context", "spare", "tokens"),
    [
        (QWEN, 40_960, 20 * GIB, 40_960),
        (QWEN, 40_960, 3 * GIB, 14_032),
        (LLAMA, 131_072, 16 * GIB, 131_072),
        (LLAMA, 131_072, 2 * GIB, 32_768),
    ],
)
def test_an_automatic_context_is_the_models_or_what_fits(
    shape: ModelShape, context: int, spare: int, tokens: int
) -> None:
    layout = CacheLayout(shape, 16, torch.bfloat16)
    config = EngineConfig(model="m")
    budget = cpu_budget(config, SpareMemory(spare, 1), layout, context)
    size = decide_size(None, budget, layout, context, may_shorten=True)
    assert size.max_model_len == tokens <= size.num_blocks * 16
    assert size.num_blocks * layout.block_bytes <= spare // 2
    assert ("raise kv_cache_memory_mb" in size.shortened or "more memory" in size.shortened) == (tokens < context)
    assert f"max_model_len is {tokens} of a context of {context} tokens" in size.shortened or tokens == context
    if tokens < context:
        with pytest.raises(ConfigError, match=f"set max_model_len to at most {tokens}"):
            decide_size(None, budget, layout, context)


@pytest.mark.parametrize(("total", "tokens"), [(24, 37_632), (80, 131_072)])
def test_an_automatic_context_on_a_gpu_is_what_gpu_memory_utilization_leaves(total: int, tokens: int) -> None:
    """An 8B model in bfloat16: 15 GiB of weights, 2 for steps and graphs."""
    layout = CacheLayout(ModelShape(32, 8, 128, 128_256, 4096, 14_336), 64, torch.bfloat16)
    left = int(0.9 * total * GIB) - 17 * GIB
    budget = MemoryBudget(left, "gpu_memory_utilization 0.9", "gpu_memory_utilization", total * GIB, 0.9)
    size = decide_size(None, budget, layout, 131_072, may_shorten=True)
    assert size.max_model_len == tokens
    assert ("set max_model_len yourself, or use a larger GPU to have all" in size.shortened) == (tokens < 131_072)


def test_the_advice_never_asks_for_more_than_is_free() -> None:
    def advice(spare: int) -> str:
        layout = CacheLayout(QWEN, 16, torch.bfloat16)
        budget = cpu_budget(EngineConfig(model="m"), SpareMemory(spare, 1), layout, 40_960)
        return decide_size(None, budget, layout, 40_960, may_shorten=True).shortened

    assert "or raise kv_cache_memory_mb to at least 4480 to have all" in advice(5 * GIB)
    assert "or use a machine with more memory to have all" in advice(4 * GIB)


def test_not_a_single_block_is_refused_also_for_an_automatic_context() -> None:
    budget = MemoryBudget(LAYOUT.block_bytes - 1, "S", "kv_cache_memory_mb")
    with pytest.raises(ConfigError, match="a KV cache of 0 tokens"):
        decide_size(None, budget, LAYOUT, 64, may_shorten=True)


@pytest.mark.parametrize("settings", [{"kv_cache_memory_mb": 100}, {"num_blocks": 100_000}])
def test_a_size_that_is_set_and_not_free_is_refused(settings: dict[str, int]) -> None:
    config = EngineConfig(model="m", **settings)  # type: ignore[arg-type]
    budget = cpu_budget(config, SpareMemory(99 * MIB, 1))
    with pytest.raises(ConfigError, match=r"host memory does not suffice: KV cache .* 99 MiB are available; lower"):
        decide_size(config.num_blocks, budget, LAYOUT, 64)


def test_a_cache_in_host_memory_takes_none_before_it_is_written() -> None:
    before = resident_bytes(os.getpid())
    kv = KVTensors(LAYOUT, GIB // LAYOUT.block_bytes, CPU)
    assert resident_bytes(os.getpid()) - before < 64 * MIB
    assert not kv.blocks[-1].any()


def test_copies_reach_keys_and_values_of_every_layer() -> None:
    kv = KVTensors(LAYOUT, 6, CPU)
    for i, (keys, values, _) in enumerate(kv.layers):
        keys.copy_(torch.arange(6.0).view(6, 1, 1, 1) + 100 * i)
        values.copy_(-torch.arange(6.0).view(6, 1, 1, 1) - 100 * i)
    kv.copy(np.array([4, 0], dtype=np.int32), np.array([1, 3], dtype=np.int32))
    for i, (keys, values, _) in enumerate(kv.layers):
        assert keys[:, 0, 0, 0].tolist() == [100 * i + block for block in (0, 4, 2, 0, 4, 5)]
        assert values[:, 15, 2, 7].tolist() == [-100 * i - block for block in (0, 4, 2, 0, 4, 5)]


def test_copies_take_scales_along() -> None:
    kv = KVTensors(LAYOUT._replace(dtype=torch.int8), 4, CPU)
    for i, cache in enumerate(cache for layer in kv.layers for cache in layer[:2]):
        cache.copy_(torch.arange(4).view(4, 1, 1, 1) + 10 * i)
        scales_behind(cache).copy_(torch.arange(4.0).view(4, 1, 1) + 100 * i)
    kv.copy(np.array([3], dtype=np.int32), np.array([1], dtype=np.int32))
    for i, cache in enumerate(cache for layer in kv.layers for cache in layer[:2]):
        assert cache[:, 15, 2, 7].tolist() == [10 * i + block for block in (0, 3, 2, 3)]
        assert scales_behind(cache)[:, 0, 1].tolist() == [100 * i + block for block in (0, 3, 2, 3)]
