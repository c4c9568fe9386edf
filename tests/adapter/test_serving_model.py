"""A whole model instance over a fake engine and a fake front end: what is opened, answered and closed."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.triton.fake_triton import (
    InferenceRequest,
    Logger,
    MetricFamily,
    Tensor,
    TritonError,
    TritonModelException,
)
from support.triton.serving import wait_for
from tidewheel import model
from tidewheel.adapter import triton_model
from tidewheel.adapter.model_calls import voice_activity
from tidewheel.engine.folder import EngineTarget
from tidewheel.engine.messages import EngineInfo, Room
from tidewheel.errors import Busy, ConfigError, Draining, TidewheelError
from tidewheel.frontend.admission_gate import AdmissionGate
from tidewheel.frontend.frontend import Frontend
from tidewheel.frontend.output import OutputChunk, Sink
from tidewheel.frontend.prompt_workers import TokenizerFolder
from tidewheel.frontend.request_figures import FrontendStats, StatsRecorder
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.health_endpoint import READY, Readiness
from tidewheel.server.repository import write_entry
from tidewheel.stats import EngineStats, Objective

INFO = EngineInfo(
    pid=1, model="/models/demo", architecture="LlamaForCausalLM", device="cpu (2 threads)", dtype="float32",
    vocab_size=64, max_model_len=1000, max_num_seqs=4, max_num_batched_tokens=64, block_size=16, num_blocks=125,
    weights_bytes=3 << 20, activation_bytes=1 << 20, kv_cache_bytes=2 << 20, enable_prefix_caching=True,
    load_seconds=0.1,
)  # fmt: skip


class FakeClient:
    is_owner = True
    has_failed = False
    num_restarts = 0
    readiness = READY
    failure: Exception | None = None

    def __init__(self, target: EngineTarget, listener: Any, *, name: str) -> None:
        self.target, self.listener, self.name = target, listener, name
        self.events: list[str] = []

    def start(self, timeout_s: float, must_stop: Callable[[], bool]) -> EngineInfo:
        if self.failure is not None:
            raise self.failure
        self.listener.on_stats(EngineStats(num_blocks=125, num_free_blocks=25, num_running=3))
        return INFO

    def close(self) -> None:
        self.events.append("client closed")


class FakeFrontend:
    """Answers at once, unless the prompt says otherwise."""

    def __init__(self, settings: FrontendSettings, gate: AdmissionGate, **options: Any) -> None:
        self.settings, self.gate, self.options = settings, gate, options
        self.engine_stats: EngineStats | None = None
        self.recorder = StatsRecorder(128)
        self.held: list[Sink] = []
        self.num_waits = 0
        gate.wait = self.note_wait  # type: ignore[method-assign]

    def start(self, info: EngineInfo, reader: FakeReader, engine: FakeClient) -> None:
        self.reader, self.engine = reader, engine

    def refuse(self, request_id: str, sink: Sink, arrival_ns: int, error: TidewheelError) -> None:
        self.recorder.received()
        self.recorder.failed(error, had_output=False)
        sink.fail(error)

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        match request.text:
            case b"busy":
                raise Busy("full", retry_after_ms=5)
            case b"bug":
                raise KeyError("secret path")
            case b"hold":
                self.held.append(sink)
            case _:
                sink.send([OutputChunk(text="done", finish_reason="stop")])

    @property
    def is_idle(self) -> bool:
        return not self.held

    def note_wait(self) -> None:
        self.num_waits += 1

    def on_stats(self, stats: EngineStats) -> None:
        self.engine_stats = stats

    def stats(self) -> FrontendStats:
        return self.recorder.snapshot()

    def close(self) -> None:
        self.engine.events.append("front end closed")
        for sink in self.held:
            sink.fail(Draining("shutting down"))


class FakeWorkers:
    def __init__(self, folder: TokenizerFolder, count: int) -> None:
        self.folder = folder

    def wait_started(self) -> None:
        if self.folder.path.name == "broken":
            raise ConfigError("tokenizer.json is not one")

    def close(self) -> None: ...


class FakeReader:
    def __init__(
        self, info: EngineInfo, tokenizer: object, encoder: FakeWorkers, settings: FrontendSettings, **options: Any
    ) -> None:
        self.model_dir, self.settings, self.options = encoder.folder.path, settings, options


class FakeTokenizer:
    @staticmethod
    def load(folder: Path, *, vocab_size: int) -> None: ...


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(triton_model, "EngineClient", FakeClient)
    monkeypatch.setattr(triton_model, "Frontend", FakeFrontend)
    monkeypatch.setattr(triton_model, "FOLLOW_S", 0.01)
    monkeypatch.setattr(triton_model, "PromptWorkers", FakeWorkers)
    monkeypatch.setattr(triton_model, "Tokenizer", FakeTokenizer)
    monkeypatch.setattr(triton_model, "RequestReader", FakeReader)
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path / "run"))
    logger = logging.getLogger("tidewheel")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


def make_args(
    tmp_path: Path, decoupled: bool = True, config: dict[str, Any] | None = None, **parameters: str
) -> dict[str, str]:
    config = {
        **(config or {}),
        "parameters": {key: {"string_value": text} for key, text in {"model": "org/demo", **parameters}.items()},
        "model_transaction_policy": {"decoupled": decoupled},
    }
    return {
        "model_name": "demo", "model_version": "1", "model_repository": str(tmp_path / "demo"),
        "model_instance_name": "demo_0", "model_config": json.dumps(config),
    }  # fmt: skip


def start(args: dict[str, str]) -> tuple[model.TritonPythonModel, FakeFrontend]:
    started = model.TritonPythonModel()
    started.initialize(args)
    return started, started._follower.serving.frontend  # type: ignore[return-value]


def ask(text: str, **tensors: Any) -> InferenceRequest:
    inputs = [Tensor("text_input", np.array([text.encode()], dtype=np.object_))]
    return InferenceRequest([*inputs, *(Tensor(name, np.array([value])) for name, value in tensors.items())])


def error_of(request: InferenceRequest) -> TritonError:
    ((response, flags),) = request.sender.sent
    error = response.error()
    assert flags == 1
    assert error is not None
    return error


def test_requests_are_answered_each_for_itself(tmp_path: Path) -> None:
    started, _ = start(make_args(tmp_path))
    good, busy, bug, bad = ask("hello"), ask("busy"), ask("bug"), ask("x", sampling_parameters=b"{")
    started.execute([bug, busy, bad, good])
    assert good.sender.sent[0][0].output_tensors()[0].as_numpy().tolist() == [b"done"]
    assert error_of(busy).message() == "[TW-BUSY retry_after_ms=5] full"
    assert error_of(bug).code() == TritonError.INTERNAL
    assert "secret path" not in error_of(bug).message()
    assert any("secret path" in line for _, line in Logger.lines)
    assert error_of(bad).message().startswith("[TW-INPUT] sampling_parameters")
    started.finalize()


def test_without_log_and_traces_nothing_is_told(tmp_path: Path) -> None:
    started, frontend = start(make_args(tmp_path))
    assert frontend.options["on_ended"] == []
    started.finalize()


def test_a_log_that_cannot_be_written_stops_the_load(tmp_path: Path) -> None:
    with pytest.raises(TritonModelException, match=r"^request_log is .* cannot be written \(No such file"):
        start(make_args(tmp_path, request_log=str(tmp_path / "missing" / "log")))


def test_a_twin_refuses_to_stream(tmp_path: Path) -> None:
    started, _ = start(make_args(tmp_path, decoupled=False))
    request = ask("hello", stream=True)
    started.execute([request])
    assert error_of(request).code() == TritonError.INVALID_ARG
    started.finalize()


def test_live_requests_end_when_the_model_is_unloaded(tmp_path: Path) -> None:
    started, frontend = start(make_args(tmp_path))
    request = ask("hold")
    started.execute([request])
    assert request.sender.sent == []
    started.finalize()
    assert error_of(request).message() == "[TW-DRAINING] shutting down"
    assert frontend.engine.events == ["front end closed", "client closed"]


def test_settings_reach_the_front_end(tmp_path: Path) -> None:
    started, frontend = start(
        make_args(
            tmp_path, num_sender_threads="2", max_prompt_bytes="9", tokenizer="tok", objective_ttft_ms="500",
            escape_special_tokens="false", voice_activity="silero_vad",
        )
    )  # fmt: skip
    assert not frontend.gate.holds
    assert frontend.settings == frontend.reader.settings
    assert frontend.settings.objective == Objective(ttft_s=0.5, tpot_s=0.1)
    assert (frontend.settings.num_sender_threads, frontend.settings.escape_special_tokens) == (2, False)
    assert frontend.reader.options.pop("defaults").sampling == {}
    assert frontend.reader.options.pop("activity").func is voice_activity
    assert frontend.reader.options == {"max_prompt_bytes": 9}
    assert frontend.reader.model_dir == Path("tok")
    request = ask("0123456789")
    started.execute([request])
    text = "[TW-TOO-LARGE] text_input has 10 bytes: at most 9 are allowed (max_prompt_bytes)"
    assert error_of(request).message() == text
    started.finalize()


def test_room_is_waited_for_behind_every_request(tmp_path: Path) -> None:
    started, frontend = start(make_args(tmp_path))
    started.execute([ask("hello"), ask("busy")])
    assert frontend.num_waits == 2
    started.finalize()


def test_a_native_queue_has_a_door_that_holds_back(tmp_path: Path) -> None:
    started, frontend = start(make_args(tmp_path, config={"dynamic_batching": {}}))
    assert frontend.gate.holds
    started.finalize()


def test_the_gate_hears_what_the_engine_says_before_the_front_end_starts() -> None:
    gate = AdmissionGate()
    frontend = Frontend(FrontendSettings(), gate)
    frontend.on_room(room := Room(1, 2, 3, 4, 0, 250, None, []))
    assert gate._room == room
    frontend.on_lost([], Draining("gone"))
    assert gate._room == Room(0, 2, 0, 4, 0, 250, None, [])
    frontend.on_drain()


def test_the_log_says_what_fits(tmp_path: Path) -> None:
    started, _ = start(make_args(tmp_path))
    started.finalize()
    text = "\n".join(line for level, line in Logger.lines if level == "info")
    for part in (
        "demo_0: engine package", "weights 3 MiB", "KV cache 2 MiB", "CPU KV cache size: 2,000 tokens",
        "Maximum concurrency for 1,000 tokens per request: 2.00x",
    ):  # fmt: skip
        assert part in text


def test_records_of_python_logging_go_to_triton(tmp_path: Path) -> None:
    started, _ = start(make_args(tmp_path))
    log = logging.getLogger("tidewheel.engine.engine_client")
    log.info("an %s", "info")
    log.warning("a warning")
    log.error("an error")
    assert [line for line in Logger.lines if line[1].startswith(("a ", "an "))] == [
        ("info", "an info"), ("warn", "a warning"), ("error", "an error"),
    ]  # fmt: skip
    started.finalize()


@pytest.mark.parametrize("failure", [ConfigError("max_model_len is 9: use 8"), Draining("shutting down")])
def test_an_engine_that_does_not_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(FakeClient, "failure", failure)
    with pytest.raises(TritonModelException) as error:
        start(make_args(tmp_path))
    assert str(error.value) == str(failure)


def test_an_engine_that_does_not_start_is_named_by_its_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "failure", ConfigError("max_model_len is 9: use 8"))
    write_entry(tmp_path, "org/demo", "demo", {})
    args = make_args(tmp_path, decoupled=False)
    config = {"parameters": {"engine_of": {"string_value": "demo"}}}
    twin = {"model_name": "demo_infer", "model_repository": str(tmp_path / "demo_infer")}
    with pytest.raises(TritonModelException, match=r"^the engine of 'demo': max_model_len is 9: use 8$"):
        start(args | twin | {"model_config": json.dumps(config)})


def test_other_settings_are_followed_and_requests_end_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, first = start(make_args(tmp_path))
    held = ask("hold")
    started.execute([held])
    target = started._follower.serving.target
    config = dataclasses.replace(target.config, max_prompt_bytes=9)
    monkeypatch.setattr(triton_model, "find_engine", lambda _: target._replace(config=config))
    wait_for(lambda: started._follower.serving.frontend is not first, 60, "the other front end")
    request = ask("0123456789")
    started.execute([request])
    assert "at most 9 are allowed" in error_of(request).message()
    assert first.engine.events == []
    first.held.pop().send([OutputChunk(text="done", finish_reason="stop")])
    wait_for(lambda: first.engine.events == ["front end closed", "client closed"], 60, "the end of the first")
    assert held.sender.sent[0][0].output_tensors()[0].as_numpy().tolist() == [b"done"]
    started.finalize()


def test_wrong_settings_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(TritonModelException, match=r"^unknown setting 'max_num_seq'; did you mean 'max_num_seqs'\?$"):
        start(make_args(tmp_path, max_num_seq="3"))


def test_a_wrong_tokenizer_leaves_no_client_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[FakeClient] = []
    monkeypatch.setattr(
        triton_model,
        "EngineClient",
        lambda *args, **kwargs: clients.append(FakeClient(*args, **kwargs)) or clients[-1],
    )
    with pytest.raises(TritonModelException, match=r"tokenizer\.json is not one"):
        start(make_args(tmp_path, tokenizer="broken"))
    assert clients[0].events == ["client closed"]


def publish(started: model.TritonPythonModel) -> None:
    metrics = started._follower.serving._metrics
    assert metrics is not None
    metrics.flush()


def test_metrics_of_owner_and_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "is_owner", False)
    started, _ = start(make_args(tmp_path))
    started.execute([ask("busy")])
    started.finalize()
    assert MetricFamily.value("vllm:num_requests_running") == 0
    assert MetricFamily.value("tidewheel_engine_ready") == 0
    assert MetricFamily.value("tidewheel_requests_rejected_total", tag="TW-BUSY", model_name="demo") == 1
    monkeypatch.setattr(FakeClient, "is_owner", True)
    started, _ = start(make_args(tmp_path))
    publish(started)
    assert MetricFamily.value("tidewheel_engine_ready", model_name="demo") == 1
    assert MetricFamily.value("vllm:num_requests_running", model_name="demo") == 3
    monkeypatch.setattr(FakeClient, "num_restarts", 1)
    publish(started)
    assert MetricFamily.value("tidewheel_engine_restarts_total", model_name="demo") == 1
    assert MetricFamily.value("vllm:kv_cache_usage_perc") == 0.8
    started.finalize()
    assert MetricFamily.value("tidewheel_engine_ready", model_name="demo") == 0
    assert MetricFamily.value("vllm:num_requests_running", model_name="demo") == 0


def test_a_server_that_asks_is_told_whether_the_engine_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, _ = start(make_args(tmp_path))
    assert started.is_ready()
    monkeypatch.setattr(FakeClient, "readiness", Readiness("hung", "no step"))
    assert not started.is_ready()
    started.finalize()
    assert MetricFamily.value("tidewheel_engine_ready") == 0


@pytest.mark.parametrize("off", [{"REPORT_CUSTOM_METRICS": "false"}, {"disable_log_stats": "true"}])
def test_metrics_can_be_switched_off(tmp_path: Path, off: dict[str, str]) -> None:
    started, _ = start(make_args(tmp_path, **off))
    started.finalize()
    assert not MetricFamily.values


def test_metrics_of_a_served_name(tmp_path: Path) -> None:
    started, _ = start(make_args(tmp_path, served_model_name="llama"))
    started.execute([ask("busy")])
    publish(started)
    assert (
        MetricFamily.value("tidewheel_requests_rejected_total", tag="TW-BUSY", model_name="llama", model="demo") == 1
    )
    assert MetricFamily.value("vllm:num_requests_running", model_name="llama", model="demo") == 3
    started.finalize()


def test_auto_complete_refuses_in_one_line() -> None:
    from support.triton.fake_triton import ModelConfig

    with pytest.raises(TritonModelException, match="max_batch_size is 4"):
        model.TritonPythonModel.auto_complete_config(ModelConfig({"name": "demo", "max_batch_size": 4}))
