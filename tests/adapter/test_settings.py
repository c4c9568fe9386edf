"""Settings of a repository entry: two places, twins, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidewheel.adapter.repository_entry import ModelSettings, load_settings
from tidewheel.config import EngineConfig, SchedulingSettings
from tidewheel.errors import ConfigError
from tidewheel.tenants import TenantLimits, parse_tenants


def write_entry(repository: Path, name: str, parameters: dict[str, str], backend: str = "tidewheel") -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in parameters.items()]
    (folder / "config.pbtxt").write_text("\n".join([f'backend: "{backend}"', *lines]))
    return folder


def load(folder: Path, parameters: dict[str, str], **config: Any) -> ModelSettings:
    """As Triton would initialize the entry: it hands the parameters over in its own JSON."""
    model_config = {"parameters": {key: {"string_value": text} for key, text in parameters.items()}, **config}
    return load_settings(
        {
            "model_name": folder.name,
            "model_repository": str(folder),
            "model_version": "1",
            "model_config": json.dumps(model_config),
        }
    )


def load_new(repository: Path, parameters: dict[str, str], **config: Any) -> ModelSettings:
    return load(write_entry(repository, "demo", parameters), parameters, **config)


def test_model_is_relative_to_the_version_folder(tmp_path: Path) -> None:
    weights = tmp_path / "demo" / "1" / "weights"
    weights.mkdir(parents=True)
    settings = load(tmp_path / "demo", {"model": "weights", "max_num_seqs": "8"})
    assert settings.engine.model == str(weights)
    assert settings.engine.max_num_seqs == 8
    assert settings.owner == settings.entry
    assert settings.entry.folder.parent == tmp_path
    assert settings.labels(settings.entry) == {"model_name": "demo", "engine": "0", "model": "demo", "version": "1"}
    assert settings.frontend.num_sender_threads == 4


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "request_log",
            "requests.jsonl",
            "request_log is 'requests.jsonl': use a path that begins with /, or stderr",
        ),
        (
            "otlp_traces_endpoint",
            "grpc://127.0.0.1:4317",
            "otlp_traces_endpoint is 'grpc://127.0.0.1:4317': use a URL",
        ),
        ("otlp_traces_endpoint", "http://", "otlp_traces_endpoint is 'http://': use a URL of OTLP over HTTP"),
        ("otlp_traces_endpoint", "http://h:99999/", "otlp_traces_endpoint is 'http://h:99999/': use a URL"),
    ],
)
def test_where_requests_are_told_of_is_checked(tmp_path: Path, setting: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_new(tmp_path, {"model": "m", setting: value})
    assert str(caught.value).startswith(message)


def test_decoupled_is_read_from_the_config(tmp_path: Path) -> None:
    folder = write_entry(tmp_path, "demo", {})
    policy = {"decoupled": True}
    assert load(folder, {"model": "m"}, model_transaction_policy=policy).entry.decoupled
    assert not load(folder, {"model": "m"}).entry.decoupled


def test_a_block_for_dynamic_batching_makes_a_native_queue(tmp_path: Path) -> None:
    folder = write_entry(tmp_path, "demo", {})
    assert load(folder, {"model": "m"}, dynamic_batching={"priority_levels": 3}).entry.has_native_queue
    assert load(folder, {"model": "m"}, dynamic_batching={}).entry.has_native_queue
    assert not load(folder, {"model": "m"}).entry.has_native_queue


def test_the_dialect_fits_what_triton_was_told(tmp_path: Path) -> None:
    folder = write_entry(tmp_path, "demo", {})
    given = {"model": "m", "io_dialect": "trtllm"}
    assert load(folder, given, max_batch_size=1).frontend.io_dialect == "trtllm"
    assert load(folder, {"model": "m"}).frontend.io_dialect == "vllm"
    for parameters, max_batch_size in ((given, 0), ({"model": "m"}, 4)):
        with pytest.raises(ConfigError, match=f"max_batch_size {max_batch_size}: set io_dialect in config.pbtxt"):
            load(folder, parameters, max_batch_size=max_batch_size)
    with pytest.raises(ConfigError, match="io_dialect is 'tensorrt': choose one of vllm, trtllm"):
        load(folder, {"model": "m", "io_dialect": "tensorrt"})


# Every setting of order, admission, preemption, strategy, control and sessions, as config.pbtxt spells it.
SCHEDULING: list[tuple[dict[str, str], dict[str, object]]] = [
    ({"scheduling_policy": "sjf"}, {"scheduling_policy": "sjf"}),
    ({"ageing_s": "2.5"}, {"ageing_s": 2.5}),
    ({"tenants": '{"a": {"weight": 2}}'}, {"tenants": '{"a": {"weight": 2}}'}),
    ({"predictor_prior_tokens": "64"}, {"predictor_prior_tokens": 64}),
    ({"cache_aware_order": "false"}, {"cache_aware_order": False}),
    ({"admit_by_growth": "false"}, {"admit_by_growth": False}),
    ({"max_waiting_requests": "7"}, {"max_waiting_requests": 7}),
    ({"max_waiting_tokens": "700"}, {"max_waiting_tokens": 700}),
    ({"breaker_error_rate": "0.5"}, {"breaker_error_rate": 0.5}),
    ({"breaker_queue_time_s": "3"}, {"breaker_queue_time_s": 3.0}),
    ({"preemption_mode": "swap", "swap_space": "0.5"}, {"preemption_mode": "swap", "swap_space": 0.5}),
    ({"max_preemptions": "2"}, {"max_preemptions": 2}),
    ({"long_prefill_token_threshold": "128"}, {"long_prefill_token_threshold": 128}),
    ({"scheduling_strategy": "static", "batch_size": "4", "batch_timeout_ms": "20"},
     {"scheduling_strategy": "static", "batch_size": 4, "batch_timeout_ms": 20.0}),
    ({"scheduling_strategy": "hybrid", "hybrid_threshold": "3", "hybrid_backlog": "30"},
     {"scheduling_strategy": "hybrid", "hybrid_threshold": 3, "hybrid_backlog": 30}),
    ({"scheduling_strategy": "dynamic", "batch_target_latency_ms": "500"},
     {"scheduling_strategy": "dynamic", "batch_target_latency_ms": 500.0}),
    ({"target_tpot_ms": "40"}, {"target_tpot_ms": 40.0}),
    ({"enable_seqs_governor": "true", "governor_target_latency_ms": "50"},
     {"enable_seqs_governor": True, "governor_target_latency_ms": 50.0}),
    ({"pressure_quantization": "int8", "pressure_memory": "0.5", "pressure_latency_ms": "50",
      "pressure_quantization_critical": "true"},
     {"pressure_memory": 0.5, "pressure_latency_ms": 50.0, "pressure_quantization_critical": True}),
    ({"session_ttl_s": "60", "max_session_ttl_s": "120", "max_sessions": "9", "session_max_blocks": "5"},
     {"session_ttl_s": 60.0, "max_session_ttl_s": 120.0, "max_sessions": 9, "session_max_blocks": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "expected"), SCHEDULING, ids=str)
def test_settings_of_the_scheduler(tmp_path: Path, parameters: dict[str, str], expected: dict[str, object]) -> None:
    engine = load_new(tmp_path, {"model": "m", **parameters}).engine
    assert {name: getattr(engine, name) for name in expected} == expected


def test_every_setting_of_the_scheduler_is_among_them() -> None:
    own = list(EngineConfig.__annotations__)
    names = {*own[own.index("scheduling_policy") :], *SchedulingSettings.__annotations__}
    tested = {name for _, expected in SCHEDULING for name in expected}
    assert tested == names - {"max_num_seqs", "max_num_batched_tokens", "max_prompt_bytes"}


def test_tenants_as_an_object(tmp_path: Path) -> None:
    folder = write_entry(tmp_path, "demo", {})
    tenants = {"acme": {"weight": 2, "requests_per_s": 5}, "*": {"tokens_per_s": 100.5}}
    (folder / "1" / "model.json").write_text(json.dumps({"tenants": tenants}))
    text = load(folder, {"model": "m"}).engine.tenants
    assert parse_tenants(text)["acme"] == TenantLimits(weight=2, requests_per_s=5)
    assert load(folder, {"model": "m", "tenants": json.dumps(tenants, indent=1)}).engine.tenants == text
    assert_one_line(folder, {"model": "m", "tenants": "{}"}, ["tenants", "config.pbtxt", "model.json", "keep one"])


def test_frontend_settings_are_not_the_engines(tmp_path: Path) -> None:
    settings = load_new(tmp_path, {"model": "m", "num_sender_threads": "2", "REPORT_CUSTOM_METRICS": "false"})
    assert settings.frontend.num_sender_threads == 2
    assert settings.frontend.max_request_s is None
    assert not settings.frontend.REPORT_CUSTOM_METRICS


@pytest.mark.parametrize(("text", "expected"), [(None, 16), ("100", 100), ("context", "context")])
def test_default_of_max_tokens(tmp_path: Path, text: str | None, expected: int | str) -> None:
    parameters = {} if text is None else {"default_max_tokens": text}
    assert load_new(tmp_path, {"model": "m", **parameters}).frontend.default_max_tokens == expected


def test_parameters_of_the_python_backend_are_left_to_it(tmp_path: Path) -> None:
    assert load_new(tmp_path, {"model": "m", "EXECUTION_ENV_PATH": "env.tar.gz"}).engine.model == "m"


def test_model_json_of_the_vllm_backend(tmp_path: Path) -> None:
    folder = write_entry(tmp_path, "demo", {})
    (folder / "1" / "model.json").write_text(
        json.dumps({"model": "org/name", "gpu_memory_utilization": 0.5, "enforce_eager": True, "max_model_len": 64})
    )
    engine = load(folder, {"max_model_len": "64", "gpu_memory_utilization": "0.50", "enforce_eager": "TRUE"}).engine
    assert (engine.model, engine.max_model_len, engine.gpu_memory_utilization) == ("org/name", 64, 0.5)


@pytest.mark.parametrize("form", ["model.json", "config.pbtxt"])
def test_every_default_of_vllm_loads(tmp_path: Path, form: str) -> None:
    folder = write_entry(tmp_path, "demo", {})
    arguments = json.loads((Path(__file__).parents[1] / "values" / "vllm_engine_arguments.json").read_text())
    values = {name: facts.get("default") for name, facts in arguments["arguments"].items()} | {"model": "m"}
    if form == "model.json":
        (folder / "1" / "model.json").write_text(json.dumps(values))
        engine = load(folder, {}).engine
    else:
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        engine = load(folder, texts).engine
    unlike_ours = {
        "scheduling_policy": "fifo", "generation_config": "auto", "gpu_memory_utilization": 0.92, "max_loras": 1,
    }  # fmt: skip
    assert engine.to_settings() == {"model": "m", "swap_space": 4.0, **unlike_ours}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"max_num_seqs": 9}', ["max_num_seqs", "'8'", "9", "config.pbtxt", "1/model.json"]),
        ("{", ["1/model.json", "line 1"]),
        ("[]", ["1/model.json", "object", "list"]),
        ('{"max_num_seq": 8}', ["'max_num_seq'", "'max_num_seqs'"]),
    ],
)
def test_wrong_model_json(tmp_path: Path, content: str, words: list[str]) -> None:
    folder = write_entry(tmp_path, "demo", {})
    (folder / "1" / "model.json").write_text(content)
    assert_one_line(folder, {"model": "m", "max_num_seqs": "8"}, words)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"model": "m", "max_num_seq": "4"}, ["'max_num_seq'", "'max_num_seqs'"]),
        ({"model": "m", "num_sender_thread": "4"}, ["'num_sender_thread'", "'num_sender_threads'"]),
        ({"model": "m", "num_sender_threads": "0"}, ["num_sender_threads", "0", "64"]),
        ({"model": "m", "stream_interval_ms": "-1"}, ["stream_interval_ms", "-1", "10000"]),
        ({"model": "m", "num_sender_threads": "two"}, ["num_sender_threads", "two", "integer"]),
        ({"model": "m", "default_max_tokens": "0"}, ["default_max_tokens", "0", "1", "context"]),
        ({"model": "m", "default_max_tokens": "full"}, ["default_max_tokens", "full", "integer or context"]),
        ({"model": "m", "max_request_s": "0"}, ["max_request_s", "0", "seconds"]),
        ({"model": "m", "max_request_s": "inf"}, ["max_request_s", "inf", "above 0"]),
        ({"model": "m", "objective_ttft_ms": "0"}, ["objective_ttft_ms", "0", "milliseconds"]),
        ({"model": "m", "objective_tpot_ms": "inf"}, ["objective_tpot_ms", "inf", "above 0"]),
        ({"model": "m", "block_size": "17"}, ["block_size", "17"]),
        ({"model": "m", "scheduling_policy": "lifo"}, ["scheduling_policy", "lifo", "fifo", "density"]),
        ({"model": "m", "scheduling_strategy": "magic"}, ["scheduling_strategy", "magic", "hybrid"]),
        ({"model": "m", "target_tpot_ms": "40", "scheduling_strategy": "static"}, ["target_tpot_ms", "static"]),
        ({"model": "m", "tenants": '{"a": {"weight": -1}}'}, ["tenants.a", "weight", "-1"]),
        ({"model": "m", "tenants": '{"a": {"wieght": 1}}'}, ["tenants.a", "wieght", "weight"]),
        ({"model": "m", "tenants": "acme"}, ["tenants is not JSON"]),
        ({"model": "m", "preemption_mode": "swap"}, ["preemption_mode", "swap_space"]),
        ({"model": "m", "override_generation_config": '{"top_p": 7}'}, ["override_generation_config", "top_p is 7"]),
        ({"model": "m", "lora_modules": '{"a": "/a"}'}, [", and enable_lora is False"]),
        ({"model": "m", "enable_lora": "True", "lora_modules": '{"a": 1}'}, ["lora_modules: a is 1", "path"]),
        ({"model": "m", "max_loras": "9", "max_cpu_loras": "8"}, ["max_cpu_loras is 8, and max_loras 9", "raise"]),
        ({"model": "m", "engine_off": "demo"}, ["'engine_of'"]),
        ({"model": "m", "zzz": "1"}, ["unknown setting 'zzz'; docs/settings.md lists them"]),
        ({"model": "m", "session_ttl_s": "7200"}, ["session_ttl_s", "7200", "3600"]),
        ({"max_num_seqs": "4"}, ["model is not set"]),
        ({"engine_of": "absent"}, ["engine_of", "'absent'", "no model of that name"]),
        ({"engine_of": "../demo"}, ["engine_of", "no model of that name"]),
    ],
)
def test_wrong_parameters(tmp_path: Path, parameters: dict[str, str], words: list[str]) -> None:
    assert_one_line(write_entry(tmp_path, "demo", parameters), parameters, words)


def assert_one_line(folder: Path, parameters: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(folder, parameters)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("enabled", [True, False])
def test_adapters_of_multi_lora_json(tmp_path: Path, enabled: bool) -> None:
    folder = write_entry(tmp_path, "demo", {"model": "m", "enable_lora": str(enabled)})
    (folder / "1" / "near").mkdir()
    (folder / "1" / "multi_lora.json").write_text('{"a": "/adapters/a", "b": "near", "c": "far"}')
    engine = load(folder, {"model": "m", "enable_lora": str(enabled)}).engine
    paths = {"a": "/adapters/a", "b": f"{folder}/1/near", "c": str(Path("far").absolute())}
    assert engine.lora_modules == (json.dumps(paths) if enabled else "")
    assert engine.lora_dir == (f"{folder}/1/loras" if enabled else "loras")


def test_wrong_multi_lora_json(tmp_path: Path) -> None:
    folder = write_entry(tmp_path, "demo", {"model": "m", "enable_lora": "true"})
    (folder / "1" / "multi_lora.json").write_text("[]")
    words = ["multi_lora.json", "list", "JSON object"]
    assert_one_line(folder, {"model": "m", "enable_lora": "true"}, words)


def test_twin_takes_the_settings_of_its_engine(tmp_path: Path) -> None:
    owner = write_entry(tmp_path, "demo", {"model": "weights", "max_num_seqs": "8", "num_sender_threads": "9"})
    (owner / "2" / "weights").mkdir(parents=True)
    (owner / "2" / "model.json").write_text('{"max_model_len": 128}')
    parameters = {"engine_of": "demo", "num_sender_threads": "2"}
    settings = load(write_entry(tmp_path, "twin", parameters), parameters)
    assert (settings.entry.name, settings.owner.name, settings.owner.version) == ("twin", "demo", "2")
    assert settings.engine.model == str(owner / "2" / "weights")
    assert (settings.engine.max_num_seqs, settings.engine.max_model_len) == (8, 128)
    assert settings.frontend.num_sender_threads == 2


def test_twin_agrees_with_its_engine(tmp_path: Path) -> None:
    parameters = {"model": "m", "num_blocks": "64"}
    owner = load_new(tmp_path, parameters)
    twin = load(write_entry(tmp_path, "twin", {"engine_of": "demo"}), {"engine_of": "demo"})
    assert twin.engine == owner.engine


@pytest.mark.parametrize(
    ("owner", "backend", "twin", "words"),
    [
        (
            {"model": "m"},
            "tidewheel",
            {"engine_of": "demo", "max_num_seqs": "4"},
            ["max_num_seqs", "demo", "engine_of"],
        ),
        ({"engine_of": "x"}, "tidewheel", {"engine_of": "demo"}, ["engine_of", "twin", "'x'"]),
        (
            {"model": "m", "adapter": "diffusers"},
            "tidewheel",
            {"engine_of": "demo"},
            ["'demo', which has an adapter"],
        ),
        ({"model": "m"}, "python", {"engine_of": "demo"}, ["demo/config.pbtxt", "'python'"]),
        ({"modle": "m"}, "tidewheel", {"engine_of": "demo"}, ["'modle'", "'model'"]),
    ],
)
def test_wrong_twins(
    tmp_path: Path, owner: dict[str, str], backend: str, twin: dict[str, str], words: list[str]
) -> None:
    write_entry(tmp_path, "demo", owner, backend)
    assert_one_line(write_entry(tmp_path, "twin", twin), twin, words)


def test_sibling_that_cannot_be_parsed(tmp_path: Path) -> None:
    write_entry(tmp_path, "demo", {}, backend='tidewheel" oops: "')
    twin = {"engine_of": "demo"}
    assert_one_line(write_entry(tmp_path, "twin", twin), twin, ["demo/config.pbtxt", "1:"])


def test_sibling_without_a_version(tmp_path: Path) -> None:
    (write_entry(tmp_path, "demo", {"model": "m"}) / "1").rmdir()
    twin = {"engine_of": "demo"}
    assert_one_line(write_entry(tmp_path, "twin", twin), twin, ["'demo'", "version folder"])
