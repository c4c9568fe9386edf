"""Which engine a front end uses after a change of settings or files, and what happens to the other one."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from support.engine.engine_clients import CONFIG, Client, endless, request
from tidewheel.config import LIVE, SIZED, EngineConfig, describe_changes
from tidewheel.engine import launcher
from tidewheel.engine.folder import CURRENT, find_engine, make_current
from tidewheel.engine.launcher import choose_engine, stop_engine
from tidewheel.errors import ConfigError
from tidewheel_process.child import ProcessHandle

Load = Callable[[EngineConfig], Client]


@pytest.fixture
def model_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tw-"))
    yield path
    for folder in path.iterdir():
        stop_engine(folder)
    shutil.rmtree(path)


@pytest.fixture
def load(model_dir: Path) -> Iterator[Load]:
    """Loads the model as a front end does."""
    clients: list[Client] = []

    def make(config: EngineConfig) -> Client:
        target = choose_engine(model_dir, config)
        client = Client(model_dir, name=f"client-{len(clients)}", target=target)
        clients.append(client)
        client.start(30.0)
        make_current(target)
        return client

    yield make
    for client in clients:
        client.close()


def change(config: EngineConfig = CONFIG, **settings: object) -> EngineConfig:
    return dataclasses.replace(config, **settings)  # type: ignore[arg-type]


# For each live setting, another value that a running engine takes.
OTHERS: dict[str, object] = {
    "max_num_seqs": 3, "max_num_batched_tokens": 100, "ageing_s": 3.0, "cache_aware_order": False,
    "predictor_prior_tokens": 5, "long_prefill_token_threshold": 64, "max_waiting_requests": 7,
    "max_waiting_tokens": 5000, "breaker_error_rate": 0.5, "breaker_queue_time_s": 9.0, "admit_by_growth": False,
    "preemption_mode": "recompute", "max_preemptions": 1, "enable_seqs_governor": True,
    "engine_start_timeout_s": 99.0, "scheduling_policy": "fair", "tenants": '{"a": {"weight": 2}}',
    "max_prompt_bytes": 999, "scheduling_strategy": "dynamic", "batch_size": 4, "batch_timeout_ms": 7.0,
    "batch_target_latency_ms": 70.0, "hybrid_threshold": 3, "hybrid_backlog": 30, "target_tpot_ms": 50.0,
    "governor_target_latency_ms": 20.0, "session_ttl_s": 9.0, "max_session_ttl_s": 999.0, "max_sessions": 9,
    "session_max_blocks": 9, "generation_config": "auto", "override_generation_config": '{"top_k": 2}',
    "max_logprobs": 3, "pressure_memory": 0.7, "pressure_latency_ms": 90.0, "pressure_quantization_critical": True,
    "lora_modules": '{"a": "/loras/a"}', "lora_limits": '{"a": {"requests_per_s": 2}}',
}  # fmt: skip
NEEDED = {
    "batch_size": {"scheduling_strategy": "static"},
    "governor_target_latency_ms": {"enable_seqs_governor": True},
}


def test_every_live_setting_reaches_the_running_engine(load: Load) -> None:
    assert OTHERS.keys() == LIVE
    started = change(pressure_quantization="int8", enable_lora=True)
    first = load(started)
    for name, value in OTHERS.items():
        changed = change(started, **{name: value, **NEEDED.get(name, {})})
        client = load(changed)
        assert client.info.pid == first.info.pid, name
        assert EngineConfig.from_settings(first.status.settings) == changed
        client.close()


@pytest.mark.parametrize("name", sorted({field.name for field in dataclasses.fields(EngineConfig)} - LIVE))
def test_any_other_setting_needs_another_engine(name: str) -> None:
    value = getattr(CONFIG, name)
    other = object.__new__(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        object.__setattr__(other, field.name, getattr(CONFIG, field.name))
    object.__setattr__(other, name, f"not {value}")
    assert not CONFIG.can_become(other)
    assert CONFIG.fixed_settings() != other.fixed_settings()


@pytest.mark.parametrize("name", sorted(SIZED))
def test_sizes_are_live_up_to_those_of_the_start(name: str) -> None:
    size = getattr(CONFIG, name)
    assert CONFIG.can_become(change(**{name: size - 1}))
    assert not CONFIG.can_become(change(**{name: size + 1}))


def test_a_recording_holds_for_one_set_of_settings(tmp_path: Path) -> None:
    config = change(record=str(tmp_path))
    assert not config.can_become(change(config, ageing_s=3.0))
    assert config.fixed_settings() != change(config, ageing_s=3.0).fixed_settings()


def test_changes_are_named_with_both_values() -> None:
    assert (
        describe_changes(CONFIG, change(max_num_seqs=9, block_size=32)) == "max_num_seqs 16 → 9, block_size None → 32"
    )


def test_a_change_takes_effect_while_requests_run(load: Load) -> None:
    first = load(CONFIG)
    first.add(endless(1))
    first.recorder.wait_started(1)
    load(change(tenants='{"poor": {"requests_per_s": 0.001}}'))
    for key in (2, 3):
        first.add(request(key, 5, tenant="poor"))
    first.recorder.wait_ended(2, 3)
    assert [first.recorder.endings[key] for key in (2, 3)] == ["length", "TW-BUSY"]
    first.cancel(1)
    first.recorder.wait_ended(1)
    assert first.recorder.endings[1] == "cancelled"


def test_settings_that_do_not_fit_the_cache_change_nothing(load: Load) -> None:
    first = load(CONFIG)
    with pytest.raises(ConfigError, match="session_max_blocks is 5000: the KV cache has 1024 blocks"):
        load(change(session_max_blocks=5000))
    assert EngineConfig.from_settings(first.status.settings) == CONFIG


def test_an_older_reading_does_not_undo_a_newer_one(load: Load, model_dir: Path) -> None:
    early = choose_engine(model_dir, CONFIG)
    changed = change(ageing_s=3.0)
    first = load(changed)
    late = Client(model_dir, target=early)
    late.start(30.0)
    late.close()
    assert EngineConfig.from_settings(first.status.settings) == changed


def test_a_restarted_engine_takes_the_settings_again(load: Load) -> None:
    first = load(CONFIG)
    second = load(change(max_num_seqs=3))
    first.close()
    os.kill(second.info.pid, 9)
    second.recorder.wait(lambda: second.recorder.num_losses, "the end of the engine")
    second.add(request(1, 5))
    second.recorder.wait_ended(1)
    assert second.status.settings["max_num_seqs"] == 3
    assert second.status.started["max_num_seqs"] == CONFIG.max_num_seqs


def test_another_engine_stands_beside_the_first_while_that_has_front_ends(load: Load, model_dir: Path) -> None:
    first = load(CONFIG)
    first.add(endless(1))
    first.recorder.wait_started(1)
    second = load(change(block_size=32))
    second.add(request(1, 5))
    second.recorder.wait_ended(1)
    assert second.info.pid != first.info.pid and first.status.is_alive
    target = find_engine(model_dir)
    assert target is not None and target.config.block_size == 32
    first.cancel(1)
    first.recorder.wait_ended(1)
    assert first.recorder.endings[1] == "cancelled"


def test_without_memory_for_both_the_first_ends_first(
    load: Load, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "available_host_bytes", lambda: 1 << 20)
    monkeypatch.setattr(launcher, "DRAIN_S", 0.2)
    first = load(CONFIG)
    first.add(endless(1))
    first.recorder.wait_started(1)
    status = first.status
    second = load(change(block_size=32))
    first.recorder.wait_ended(1)
    assert first.recorder.endings[1] == "TW-DRAINING"
    assert not status.is_alive and second.status.is_alive


@pytest.mark.parametrize("more", [{}, {"model": "m", "speculation": "draft_model"}])
def test_changed_files_of_the_model_or_its_draft_need_another_engine(
    model_dir: Path, tmp_path: Path, more: dict[str, str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    config = change(**({"draft_model" if more else "model": str(tmp_path)} | more))
    before = choose_engine(model_dir, config)
    assert choose_engine(model_dir, config).folder == before.folder
    (tmp_path / "model.safetensors").write_bytes(b"22")
    assert choose_engine(model_dir, config).folder != before.folder


def test_what_an_ended_engine_left_is_removed_at_the_next_load(load: Load, model_dir: Path) -> None:
    first = load(CONFIG)
    status = first.status
    first.close()
    handle = ProcessHandle(status.pid, status.start_ticks)
    assert handle.wait(30.0)
    handle.close()
    second = load(change(block_size=32))
    assert {path.name for path in model_dir.iterdir()} == {CURRENT, second.status.identity}


def test_nothing_serves_before_the_first_load(model_dir: Path) -> None:
    assert find_engine(model_dir) is None
    target = choose_engine(model_dir, CONFIG)
    assert (model_dir / CURRENT).resolve() == target.folder.resolve()
    assert find_engine(model_dir) is None


GPU_BYTES = 80 << 30


@pytest.mark.parametrize(
    ("changes", "fits"),
    [({}, False), ({"gpu_memory_utilization": 0.3}, True), ({"kv_cache_memory_mb": 30_000}, True),
     ({"kv_cache_memory_mb": 50_000}, False), ({"num_blocks": 100}, True)],
)  # fmt: skip
def test_room_on_a_gpu_is_what_the_present_engine_leaves(load: Load, changes: dict[str, float], fits: bool) -> None:
    status = load(CONFIG).status
    assert status.info is not None
    info = msgspec.structs.replace(status.info, device_bytes=GPU_BYTES, kv_cache_bytes=GPU_BYTES // 2)
    present = msgspec.structs.replace(status, info=info)
    assert launcher._fits_beside(present, change(**changes)) is fits
