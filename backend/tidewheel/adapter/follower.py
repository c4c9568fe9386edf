"""Front ends of a model instance: the current one, and older ones that still have requests."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tidewheel.adapter.metrics import EngineMetrics, MetricsPublisher, RequestMetrics
from tidewheel.adapter.repository_entry import ModelSettings
from tidewheel.config import EngineConfig
from tidewheel.engine.engine_client import EngineClient
from tidewheel.engine.folder import EngineTarget
from tidewheel.engine.messages import EngineInfo
from tidewheel.engine.placement import find_engine, may_start
from tidewheel.frontend.admission_gate import HoldingGate, RefusingGate
from tidewheel.frontend.frontend import NUM_TOKENIZERS, EngineRelay, Frontend
from tidewheel.frontend.live_request import EndedRequest
from tidewheel.frontend.model_files import GenerationDefaults
from tidewheel.frontend.prompt_process import TokenizerFolder
from tidewheel.frontend.prompt_workers import PromptWorkers
from tidewheel.frontend.request_log import EventQueue, RequestLog
from tidewheel.frontend.request_reader import RequestReader
from tidewheel.frontend.request_spans import RequestSpans
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.health_endpoint import HealthEndpoint, Readiness

log = logging.getLogger(__name__)

FOLLOW_S = 1.0


class RequestEvents:
    def __init__(self, settings: ModelSettings) -> None:
        """Raise `ConfigError`."""
        model, frontend = settings.entry.labels["model_name"], settings.frontend
        log = RequestLog(frontend.request_log, model) if frontend.request_log else None
        endpoint = frontend.otlp_traces_endpoint
        spans = RequestSpans(endpoint, model) if endpoint else None
        self.has_spans = spans is not None
        self._sinks = [sink for sink in (log, spans) if sink is not None]
        self._queues = [EventQueue(sink.name, sink.write) for sink in self._sinks]

    @property
    def listener(self) -> Callable[[EndedRequest], None] | None:
        return self.put if self._queues else None

    def put(self, ended: EndedRequest) -> None:
        for queue in self._queues:
            queue.put(ended)

    def close(self) -> None:
        for queue in self._queues:
            queue.close()
        for sink in self._sinks:
            sink.close()


class HealthPort:
    """Health endpoint of a model, held by the first of its front ends to `try_open`."""

    def __init__(self, host: str, port: int | None, report: Callable[[], Readiness]) -> None:
        self._host = host
        self._port = port
        self._report = report
        self._endpoint: HealthEndpoint | None = None
        self._problem = ""

    def try_open(self) -> None:
        if self._port is None or self._endpoint is not None:
            return
        try:
            self._endpoint = HealthEndpoint(self._host, self._port, self._report)
        except OSError as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.info("health_port %d is not opened here: %s", self._port, error.strerror)
        else:
            log.info("readiness: http://%s:%d/ready", self._host, self._endpoint.port)

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


class EngineFrontend:
    """Front end of one engine, with its metrics."""

    def __init__(
        self,
        settings: ModelSettings,
        target: EngineTarget,
        name: str,
        must_stop: Callable[[], bool],
        on_ended: Callable[[EndedRequest], None] | None = None,
    ) -> None:
        """Start or join the engine. Raise `ConfigError` or a `TidewheelError` if it cannot serve or `must_stop`."""
        self.target = target
        self.refused: Counter[str] = Counter()  # by tag, before the front end
        self.is_leaving = False  # another serves new requests
        gate = HoldingGate() if settings.has_native_queue else RefusingGate()
        self._relay = relay = EngineRelay(gate)
        self._client = EngineClient(target, relay, name=f"{name}.{os.getpid()}")
        try:
            info = self._client.start(target.config.engine_start_timeout_s, must_stop)
            self.frontend = relay.frontend = Frontend(
                info,
                _make_reader(settings, target.config, info),
                self._client,
                max_prompt_bytes=target.config.max_prompt_bytes,
                gate=gate,
                num_senders=settings.frontend.num_sender_threads,
                stream_interval_s=1e-3 * settings.frontend.stream_interval_ms,
                on_idle=self._publish_last,
                objective=settings.frontend.objective,
                on_ended=on_ended,
            )
        except BaseException:
            self._client.close()
            raise
        if self._client.is_owner:
            for line in info.describe():
                log.info("%s", line)
        self._metrics = self._publish_metrics(settings, info) if settings.has_metrics else None

    @property
    def has_failed(self) -> bool:
        return self._client.has_failed

    @property
    def readiness(self) -> Readiness:
        return self._client.readiness

    def close(self) -> None:
        self.frontend.close()
        if self._metrics is not None:
            self._metrics.close()
            if self._client.is_owner and not self._has_successor():
                self._engine_metrics.clear()
        self._client.close()

    def _has_successor(self) -> bool:
        current = find_engine(self.target.folder.parent)
        return current is not None and current.folder != self.target.folder

    def _publish_metrics(self, settings: ModelSettings, info: EngineInfo) -> MetricsPublisher:
        requests = RequestMetrics(settings.entry.labels, self.frontend.stats())
        self._engine_metrics = engine = EngineMetrics(info, settings.owner.labels)

        def publish() -> bool:
            has_time = self.frontend.is_idle
            is_behind = requests.publish(self.frontend.stats(), self.refused, has_time=has_time)
            engine.publish_restarts(self._client.num_restarts, is_owner=self._client.is_owner)
            engine.publish_ready(self.readiness.is_ready if self._client.is_owner and not self.is_leaving else None)
            if self._relay.stats is not None and self._client.is_owner:
                is_behind = engine.publish(self._relay.stats, has_time=has_time) or is_behind
            elif self._relay.stats is not None:
                engine.follow(self._relay.stats)
            return is_behind and has_time

        return MetricsPublisher(publish)

    def _publish_last(self) -> None:
        """Publish all metrics before the last response of the last live request."""
        if self._metrics is not None:
            self._metrics.flush()


def _make_reader(settings: ModelSettings, config: EngineConfig, info: EngineInfo) -> RequestReader:
    """Raise `ConfigError` without a usable tokenizer."""
    folder = TokenizerFolder(Path(config.tokenizer or info.model), info.vocab_size, config.max_prompt_bytes)
    encoder = PromptWorkers(folder, NUM_TOKENIZERS)
    try:
        encoder.wait_tried()  # before this process reads the files
        return RequestReader(
            info,
            Tokenizer.load(folder.path, vocab_size=info.vocab_size),
            encoder,
            max_prompt_bytes=config.max_prompt_bytes,
            default_max_tokens=settings.frontend.default_max_tokens,
            defaults=_load_defaults(info, config),
            pooling=settings.frontend.pooling,
            escape_special_tokens=settings.frontend.escape_special_tokens,
        )
    except BaseException:
        encoder.close()
        raise


def _load_defaults(info: EngineInfo, config: EngineConfig) -> GenerationDefaults:
    """Read `generation_config.json` only for a setting, as Triton's vLLM backend."""
    return GenerationDefaults.load(
        Path(info.model), config.generation_config or "vllm", config.override_generation_config
    )


class Follower:
    """Thread that follows the model to another engine or other settings. Requests in flight end where they are."""

    def __init__(self, model_dir: Path, settings: ModelSettings, target: EngineTarget, name: str) -> None:
        self.lock = threading.Lock()  # held to submit to `serving`, so that it is not closed meanwhile
        self._model_dir = model_dir
        self._settings = settings
        self._name = name
        self._leaving: list[EngineFrontend] = []
        self._stopped = threading.Event()
        self.events = RequestEvents(settings)
        self._health = HealthPort(settings.frontend.health_host, settings.frontend.health_port, self._readiness)
        self._health.try_open()
        try:
            self.serving = self._serve(target)
        except BaseException:
            self._health.close()
            self.events.close()
            raise
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._health.close()
        for serving in (*self._leaving, self.serving):
            serving.close()
        self.events.close()

    def _readiness(self) -> Readiness:
        loads = not hasattr(self, "serving")
        return Readiness("starting", "the engine loads") if loads else self.serving.readiness

    def _run(self) -> None:
        while not self._stopped.wait(FOLLOW_S):
            self._health.try_open()
            try:
                self._follow()
            except Exception as error:  # tried again
                log.warning("%s cannot follow to other settings: %s: %s", self._name, type(error).__name__, error)

    def _follow(self) -> None:
        for serving in [serving for serving in self._leaving if serving.frontend.is_idle]:
            self._leaving.remove(serving)
            serving.close()
        target = self._next_target()
        if target is None:
            return
        serving = self._serve(target)
        self.serving.is_leaving = True
        with self.lock:
            self._leaving.append(self.serving)
            self.serving = serving
        log.info("%s follows to engine %s", self._name, target.folder.name)

    def _serve(self, target: EngineTarget) -> EngineFrontend:
        return EngineFrontend(self._settings, target, self._name, self._stopped.is_set, self.events.listener)

    def _next_target(self) -> EngineTarget | None:
        now, has_failed = self.serving.target, self.serving.has_failed
        target = find_engine(self._model_dir)  # after: what it was before the failure does not count
        if has_failed:
            return target or (now if may_start(now) else None)
        if target is None or (target.folder, target.config) == (now.folder, now.config):
            return None
        is_older = target.folder == now.folder and target.read_ns < now.read_ns  # an engine has started again
        return None if is_older else target
