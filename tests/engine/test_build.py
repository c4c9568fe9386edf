"""Every scheduling setting of an engine reaches its scheduler."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler, engine_info
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError
from tidewheel.runner.info import RunnerInfo
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.tenants import TenantLimits

INFO = EngineInfo(
    pid=1, model="m", architecture="a", device="cpu", dtype="float32", vocab_size=100, max_model_len=512,
    max_num_seqs=32, max_num_batched_tokens=256, block_size=16, num_blocks=64, weights_bytes=0, activation_bytes=0,
    kv_cache_bytes=0, enable_prefix_caching=True, load_seconds=0.0, num_host_blocks=8, swap_seconds_per_block=0.001,
)  # fmt: skip


def built(**settings: object) -> SchedulerConfig:
    return build_scheduler(EngineConfig(model="m", **settings), INFO)._state.config


@pytest.mark.parametrize(
    ("setting", "value", "field", "expected"),
    [
        ("scheduling_policy", "sjf", "policy", "sjf"),
        ("ageing_s", 3.0, "ageing_s", 3.0),
        ("tenants", '{"t": {"weight": 2}}', "tenants", {"t": TenantLimits(weight=2)}),
        ("predictor_prior_tokens", 7, "predictor_prior_tokens", 7),
        ("max_waiting_requests", 5, "max_waiting_requests", 5),
        ("max_waiting_tokens", 999, "max_waiting_tokens", 999),
        ("breaker_error_rate", 0.5, "breaker_error_rate", 0.5),
        ("breaker_queue_time_s", 2.0, "breaker_queue_time_s", 2.0),
        ("preemption_mode", "recompute", "preemption_mode", "recompute"),
        ("max_preemptions", 1, "max_preemptions", 1),
        ("long_prefill_token_threshold", 64, "long_prefill_token_threshold", 64),
        ("target_tpot_ms", 50.0, "target_tpot_ms", 50.0),
        ("enable_seqs_governor", True, "enable_seqs_governor", True),
    ],
)
def test_a_setting_reaches_the_scheduler(setting: str, value: object, field: str, expected: object) -> None:
    assert getattr(built(), field) != expected
    assert getattr(built(**{setting: value}), field) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("setting", "value", "field", "expected"),
    [
        ("batch_size", 3, "batch_size", 3),
        ("batch_timeout_ms", 20.0, "batch_timeout_ms", 20.0),
        ("batch_target_latency_ms", 200.0, "batch_target_latency_ms", 200.0),
        ("hybrid_threshold", 2, "hybrid_threshold", 2),
        ("hybrid_backlog", 9, "hybrid_backlog", 9),
    ],
)
def test_a_setting_reaches_the_strategy(setting: str, value: object, field: str, expected: object) -> None:
    assert getattr(built(), field) != expected
    config = built(**{"scheduling_strategy": "static", setting: value})
    assert config.scheduling_strategy == "static"
    assert getattr(config, field) == expected


def test_what_the_runner_measured_reaches_the_scheduler() -> None:
    config = built()
    assert (config.swap_seconds_per_block, config.batch_size) == (0.001, 32)
    kv = build_scheduler(EngineConfig(model="m", max_sessions=3, session_max_blocks=2), INFO)._state.kv
    assert (kv.num_blocks, kv.stats.num_host_blocks, kv.block_size) == (64, 8, 16)
    limits = kv.sessions.limits
    assert (limits.max_sessions, limits.max_session_blocks) == (3, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tenants": '{"t": {"max_blocks": 65}}'}, "tenants.t: max_blocks is 65: the KV cache has 64 blocks"),
        ({"session_max_blocks": 100}, "session_max_blocks is 100: the KV cache has 64 blocks"),
    ],
)
def test_quotas_above_the_pool_stop_the_load(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(**settings)


@pytest.mark.parametrize(
    ("device", "setting", "num_steps"),
    [
        ("cpu (2 threads)", None, 1), ("cpu (2 threads)", True, 2), ("cpu (2 threads)", False, 1),
        ("NVIDIA H200", None, 2), ("NVIDIA H200", True, 2), ("NVIDIA H200", False, 1),
    ],
)  # fmt: skip
def test_one_step_ahead_where_it_overlaps_or_is_asked_for(device: str, setting: bool | None, num_steps: int) -> None:
    config = EngineConfig(model="m", async_scheduling=setting)
    facts = {name: getattr(INFO, name) for name in RunnerInfo.__struct_fields__}
    info = engine_info(RunnerInfo(**(facts | {"device": device})), config)
    assert info.async_scheduling is (num_steps == 2)
    assert build_scheduler(config, info).max_inflight_steps == num_steps


def test_the_log_says_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    facts = {name: getattr(INFO, name) for name in RunnerInfo.__struct_fields__}
    with caplog.at_level(logging.INFO):
        info = engine_info(RunnerInfo(**facts), EngineConfig(model="m"))
    assert caplog.messages == info.describe()
    assert "CPU KV cache size: 1,024 tokens" in caplog.messages


def test_every_field_of_the_scheduler_is_set_by_the_engine() -> None:
    """But for those that the scheduler's defaults decide, or the kind of model."""
    changed = built(
        scheduling_policy="fair", ageing_s=1.0, cache_aware_order=False, admit_by_growth=False, tenants='{"t": {}}',
        predictor_prior_tokens=1, max_waiting_requests=1,
        max_waiting_tokens=1, breaker_error_rate=0.1, breaker_queue_time_s=0.1, preemption_mode="recompute",
        max_preemptions=0, long_prefill_token_threshold=1, target_tpot_ms=1.0, enable_seqs_governor=True,
        governor_target_latency_ms=1.0, scheduling_strategy="hybrid", batch_timeout_ms=1.0,
        batch_target_latency_ms=2.0, hybrid_threshold=1, hybrid_backlog=1, pressure_quantization="int8",
        pressure_memory=0.5, pressure_latency_ms=1.0, pressure_quantization_critical=True, enable_lora=True,
        speculation="prompt_lookup", num_speculative_tokens=3,
    )  # fmt: skip
    default = {
        field.name
        for field in dataclasses.fields(SchedulerConfig)
        if field.default is not dataclasses.MISSING and getattr(changed, field.name) == field.default
    }
    assert default == {"least_cut_tokens", "max_inflight_steps", "takes_turns", "watermark"}
