from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError


def test_text_values_become_typed() -> None:
    config = EngineConfig.from_settings(
        {"model": "m", "max_num_seqs": "12", "gpu_memory_utilization": "0.5", "enable_prefix_caching": "false"}
    )
    assert (config.max_num_seqs, config.gpu_memory_utilization, config.enable_prefix_caching) == (12, 0.5, False)


def test_settings_round_trip() -> None:
    config = EngineConfig(model="m", num_blocks=7, dtype="float32")
    assert config.to_settings() == {"model": "m", "num_blocks": 7, "dtype": "float32"}
    assert EngineConfig.from_settings(config.to_settings()) == config


def test_a_cache_of_8_bits_needs_another_engine() -> None:
    one, other = (EngineConfig.from_settings({"model": "m", "kv_cache_dtype": name}) for name in ("auto", "fp8"))
    assert other.kv_cache_dtype == "fp8_e4m3" and one == EngineConfig.from_settings({"model": "m"})
    assert not one.can_become(other) and other.can_become(other)


def test_model_folder_is_found_beside_the_entry(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    assert EngineConfig.from_settings({"model": "weights"}, base_dir=tmp_path).model == str(tmp_path / "weights")
    assert EngineConfig.from_settings({"model": "org/name"}, base_dir=tmp_path).model == "org/name"


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "model is not set"),
    ({"model": "m", "max_num_seq": 1}, "did you mean 'max_num_seqs'"),
    ({"model": "m", "decoupled": "true"}, "model_transaction_policy"),
    ({"model": "m", "use_v1": 1}, "unknown setting 'use_v1'; docs/settings.md lists them"),
    ({"model": "m", "tensor_paralel_size": 1}, "did you mean 'tensor_parallel_size'?"),
    ({"model": "m", "no_such_word": 1}, "'no_such_word'; docs/settings.md lists them"),
    ({"model": "m", "zzz": 1}, "unknown setting 'zzz'"),
    ({"model": "m", "max_num_seqs": 0}, "max_num_seqs is 0"),
    ({"model": "m", "max_num_seqs": "many"}, "must be an integer"),
    ({"model": "m", "max_num_seqs": "1.5"}, "must be an integer"),
    ({"model": "m", "max_num_seqs": []}, "must be a number"),
    ({"model": "m", "max_num_seqs": "1e999"}, "must be an integer"),
    ({"model": "m", "block_size": 17}, "block_size is 17: choose one of 16, 32, 64, 128"),
    ({"model": "m", "gpu_memory_utilization": "nan"}, "must be a number"),
    ({"model": "m", "gpu_memory_utilization": 1.5}, "0.05 to 1"),
    ({"model": "m", "dtype": "int8"}, "choose one of auto, float32"),
    ({"model": "m", "enable_prefix_caching": "maybe"}, "true or false"),
    ({"model": "m", "trust_remote_code": "true"}, "never run"),
    ({"model": "m", "tensor_parallel_size": "0"}, "tensor_parallel_size is 0: it must be at least 1"),
    ({"model": "m", "tensor_parallel_size": 2, "deterministic": True}, "sums over ranks may depend on the batch"),
    ({"model": "m", "pipeline_parallel_size": "2"}, "pipeline_parallel_size is '2': layers are not spread"),
    ({"model": "m", "kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype is 'fp8_e5m2': choose one of auto, fp8_e4m3"),
    ({"model": "m", "kv_cache_dtype_skip_layers": ["0"]}, "kv_cache_dtype_skip_layers is ['0']: all layers"),
    (
        {"model": "m", "num_blocks": 4, "kv_cache_memory_mb": 4},
        "both set the size of the KV cache; set kv_cache_memory_mb to None, or leave num_blocks out",
    ),
    ({"model": "m", "scheduling_policy": "best"}, "choose one of"),
    ({"model": "m", "scheduling_strategy": "best"}, "choose one of continuous, static"),
    ({"model": "m", "target_tpot_ms": 50, "scheduling_strategy": "static"}, "a static batch runs to its end"),
    ({"model": "m", "enable_seqs_governor": "true", "scheduling_strategy": "predictive"}, "both set the number"),
    ({"model": "m", "governor_target_latency_ms": 5}, "set enable_seqs_governor to True, or leave"),
    ({"model": "m", "batch_size": 8}, "continuous: it has no effect then; set scheduling_strategy to static, or"),
    ({"model": "m", "batch_size": 512, "scheduling_strategy": "static"}, "max_num_seqs allows 256"),
    ({"model": "m", "swap_space": 1, "enable_prefix_caching": False}, "keeps blocks by their content"),
    (
        {"model": "m", "deterministic": "true", "quantization": "fp8"},
        "set quantization to auto or none, or leave deterministic",
    ),
    ({"model": "m", "preemption_mode": "swap"}, "swap_space is 0"),
    ({"model": "m", "pressure_quantization": "fp8"}, "'fp8': choose one of none, int8, int4"),
    ({"model": "m", "pressure_memory": 0.5}, "pressure_memory is 0.5, and pressure_quantization is none"),
    (
        {"model": "m", "pressure_quantization": "int8", "quantization": "int4"},
        "quantization is int4: a copy is made of exact",
    ),
    (
        {"model": "m", "pressure_quantization": "int8", "deterministic": "true"},
        "set deterministic to False, or leave pressure",
    ),
    ({"model": "m", "pressure_quantization": "int8", "pressure_memory": 1.5}, "pressure_memory is 1.5"),
    ({"model": "m", "speculation": "lookup"}, "'lookup': choose one of none, prompt_lookup, first_layers"),
    ({"model": "m", "speculation": "prompt_lookup", "num_speculative_tokens": 0}, "tokens is 0: it must be 1 to 32"),
    ({"model": "m", "speculation": "prompt_lookup", "num_speculative_tokens": 1000}, "is 1000: it must be 1 to 32"),
    (
        {"model": "m", "num_speculative_tokens": 4},
        "set speculation to prompt_lookup or",
    ),
    ({"model": "m", "draft_model": "d"}, "set speculation to draft_model or eagle3, or"),
    (
        {"model": "m", "speculation": "first_layers", "draft_model": "d"},
        "set speculation to draft_model or eagle3, or leave draft_model out",
    ),
    ({"model": "m", "speculation": "draft_model"}, "draft_model is not set"),
    ({"model": "m", "speculation": "eagle3"}, "draft_model is not set"),
    (
        {"model": "m", "speculation": "prompt_lookup", "num_draft_layers": 2},
        "set speculation to first_layers, or",
    ),
    ({"model": "m", "speculation": "first_layers", "num_draft_layers": 0}, "num_draft_layers is 0"),
    (
        {"model": "m", "speculation": "first_layers", "tensor_parallel_size": 2},
        "first_layers, and tensor_parallel_size is 2",
    ),
    (
        {"model": "m", "speculation": "prompt_lookup", "max_num_batched_tokens": 8},
        "num_speculative_tokens is 8, and max_num_batched_tokens 8",
    ),
    (
        {"model": "m", "kind": "one_shot", "adapter": "onnxruntime", "speculation": "prompt_lookup"},
        "speculation is set, and a model of kind one_shot does not read it",
    ),
    ({"model": "m", "session_ttl_s": 7200}, "session_ttl_s is 7200"),
    ({"model": "m", "preemption_mode": "drop"}, "'drop': choose one of auto, recompute, swap"),
    ({"model": "m", "ageing_s": 0}, "ageing_s is 0"),
    ({"model": "m", "max_num_batched_tokens": -1}, "max_num_batched_tokens is -1: it must be at least 1"),
    ({"model": "m", "max_waiting_tokens": 0}, "max_waiting_tokens is 0: it must be at least 1"),
    ({"model": "m", "max_preemptions": -1}, "max_preemptions is -1: it must be at least 0"),
    ({"model": "m", "long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1: it must be at least 1"),
    ({"model": "m", "predictor_prior_tokens": 0}, "predictor_prior_tokens is 0: it must be at least 1"),
    ({"model": "m", "breaker_error_rate": 1.5}, "breaker_error_rate is 1.5"),
    ({"model": "m", "tenants": "{"}, "tenants is not JSON"),
    ({"model": "m", "tenants": "[]"}, "must be a JSON object"),
    ({"model": "m", "tenants": {"a": 3}}, "tenants.a is 3"),
    ({"model": "m", "tenants": {"a": {"weigth": 3}}}, "did you mean 'weight'"),
    ({"model": "m", "tenants": '{"a": {"weight": -1}}'}, "tenants.a: weight is -1: it must be above 0"),
    ({"model": "m", "tenants": {"a": {"max_blocks": 1.5}}}, "must be an integer"),
    ({"model": "m", "tenants": {"a": {"weight": None}}}, "tenants.a: weight is None: it must be a number"),
    ({"model": "m", "tenants": {"a": {"max_sessions": 0}}}, "tenants.a: max_sessions is 0: it must be above 0"),
    ({"model": "m", "tenants": {"a": {"max_priority": 5}}}, "max_priority is 5: it must be 1 (CRITICAL) to 4 (LOW)"),
    ({"model": "m", "tenants": {"a": {"max_priority": None}}}, "max_priority is None: it must be a number"),
    (
        {"model": "m", "tenants": {"a": {"max_priority": "best"}}},
        "max_priority is 'best': it must be a number, or a class",
    ),
    ({"model": "m", "tenants": {"acme\0": {}}}, "tenants has a name with the control character U+0000 at position 4"),
    ({"model": "m", "tenants": {"*": {"each": 1}}}, "tenants.*: each is 1: it must be true or false"),
    ({"model": "m", "tenants": {"a": {"each": True}}}, "tenants.a: each belongs to the entry '*' alone; remove it"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=lambda v: str(v)[:40])
def test_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_settings(settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
