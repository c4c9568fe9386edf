import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

import tidewheel
from tidewheel.adapter.metrics import EngineMetrics, MetricsPublisher, request_metrics
from tidewheel.adapter.model_calls import CalledModel, ModelCall, voice_activity
from tidewheel.adapter.one_shot import complete_entry, read_tensors
from tidewheel.adapter.repository_entry import ModelSettings, load_settings
from tidewheel.adapter.responder import TritonSink
from tidewheel.adapter.stub_process import Presence, close_inherited_connections, is_stub
from tidewheel.adapter.tensors import complete, read_request
from tidewheel.confidential import TracebackFormatter, protect_texts
from tidewheel.config import EngineConfig
from tidewheel.engine.engine_client import EngineClient
from tidewheel.engine.folder import EngineTarget, engine_dir, find_engine, make_current, may_start, take_back
from tidewheel.engine.launcher import choose_engine
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError, InternalError, TidewheelError
from tidewheel.frontend.admission_gate import AdmissionGate
from tidewheel.frontend.ended_requests import EndedRequest, EventQueue, RequestLog, RequestSpans
from tidewheel.frontend.frontend import NUM_TOKENIZERS, Frontend
from tidewheel.frontend.prompt_workers import PromptWorkers, TokenizerFolder
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.request_reader import RequestReader
from tidewheel.frontend.settings import GenerationDefaults
from tidewheel.frontend.speech import loudness
from tidewheel.frontend.tensor_reader import TensorReader
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.one_shot.shared_tensors import kept_files
from tidewheel.private_dir import close_shared_memory

log = logging.getLogger(__name__)

FOLLOW_S = 1.0
_NOT_SUBMITTED = "the request could not be submitted; the server's log says why"


class TritonHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        triton = pb_utils.Logger
        severe = triton.log_error if record.levelno >= logging.ERROR else triton.log_warn
        (severe if record.levelno >= logging.WARNING else triton.log_info)(self.format(record))


def route_logging() -> None:
    """Pass the package's log on to Triton's."""
    logger, handler = logging.getLogger("tidewheel"), TritonHandler()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler.setFormatter(TracebackFormatter())
    logger.handlers = [handler]


class EngineFrontend:
    def __init__(
        self,
        settings: ModelSettings,
        target: EngineTarget,
        name: str,
        must_stop: Callable[[], bool],
        on_ended: Sequence[Callable[[EndedRequest], None]] = (),
    ) -> None:
        """Start or join the engine. Raise `ConfigError` or `TidewheelError` if the engine fails or `must_stop()`."""
        self.target = target
        self.is_leaving = False  # another serves new requests
        gate = AdmissionGate(holds=settings.entry.has_native_queue)
        self.frontend = Frontend(settings.frontend, gate, on_idle=self._publish_last, on_ended=on_ended)
        self.client = EngineClient(target, self.frontend, name=f"{name}.{os.getpid()}")
        try:
            info = self.client.start(target.config.engine_start_timeout_s, must_stop)
            self.frontend.start(info, _make_reader(settings, target.config, info), self.client)
        except BaseException:
            self.client.close()
            raise
        if self.client.is_owner:
            for line in info.describe():
                log.info("%s", line)
        has_metrics = settings.frontend.REPORT_CUSTOM_METRICS and not settings.engine.disable_log_stats
        self._metrics = self._publish_metrics(settings, info) if has_metrics else None

    def close(self) -> None:
        self.frontend.close()
        if self._metrics is not None:
            self._metrics.close()
            current = find_engine(self.target.folder.parent)
            if self.client.is_owner and (current is None or current.folder == self.target.folder):
                self._engine_metrics.clear()  # it has no successor
        self.client.close()

    def _publish_metrics(self, settings: ModelSettings, info: EngineInfo) -> MetricsPublisher:
        requests = request_metrics(settings.labels(settings.entry), self.frontend.stats())
        self._engine_metrics = engine = EngineMetrics(info, settings.labels(settings.owner))

        def publish() -> bool:
            has_time, is_owner = self.frontend.is_idle, self.client.is_owner
            is_behind = requests.publish(self.frontend.stats(), has_time=has_time)
            engine.restarts.advance({"": self.client.num_restarts}, is_ours=is_owner)
            engine.ready.advance(
                {"": float(self.client.readiness.is_ready)}, is_ours=is_owner and not self.is_leaving
            )
            stats = self.frontend.engine_stats
            if stats is not None:
                is_behind = engine.publish(stats, is_ours=is_owner, has_time=has_time) or is_behind
            return is_behind and has_time

        return MetricsPublisher(publish)

    def _publish_last(self) -> None:
        if self._metrics is not None and self.target.config.kind == "text":  # it takes as long as a small model
            self._metrics.flush()


def _make_reader(settings: ModelSettings, config: EngineConfig, info: EngineInfo) -> RequestReader | TensorReader:
    if info.signature is not None:
        return TensorReader(info)
    folder = TokenizerFolder(Path(config.tokenizer or info.model), info.vocab_size, config.max_prompt_bytes)
    source = config.generation_config or "vllm"  # without the setting none, as Triton's vLLM backend
    encoder, voice = PromptWorkers(folder, NUM_TOKENIZERS), settings.frontend.voice_activity
    try:
        encoder.wait_started()  # before this process reads the files
        return RequestReader(
            info,
            Tokenizer.load(folder.path, vocab_size=info.vocab_size),
            encoder,
            settings.frontend,
            max_prompt_bytes=config.max_prompt_bytes,
            defaults=GenerationDefaults.load(Path(info.model), source, config.override_generation_config),
            activity=functools.partial(voice_activity, voice) if voice else loudness,
        )
    except BaseException:
        encoder.close()
        raise


def _open_events(settings: ModelSettings, until: contextlib.ExitStack) -> Iterator[Callable[[EndedRequest], None]]:
    """Open request log and span exporter, if they are set, and yield the `put` of each queue. Raise `ConfigError`."""
    model, frontend = settings.labels(settings.entry)["model_name"], settings.frontend
    for kind, target in ((RequestLog, frontend.request_log), (RequestSpans, frontend.otlp_traces_endpoint)):
        if target:
            sink = until.enter_context(contextlib.closing(kind(target, model)))
            yield until.enter_context(contextlib.closing(EventQueue(sink.name, sink.write))).put


class Follower:
    """Thread that moves a model instance to a new engine or settings. Requests in flight finish on the old engine."""

    def __init__(self, model_dir: Path, settings: ModelSettings, target: EngineTarget, name: str) -> None:
        """Serve from the engine `target`, and switch the model's other front ends to it."""
        self.lock = threading.Lock()  # held to submit to `serving`, so that it is not closed meanwhile
        self._model_dir = model_dir
        self._settings = settings
        self._name = name
        self._leaving: list[EngineFrontend] = []
        self._stopped = threading.Event()
        with contextlib.ExitStack() as undo:
            undo.callback(take_back, model_dir)
            self._events = undo.enter_context(contextlib.ExitStack())
            self._on_ended = [*_open_events(settings, self._events)]
            self.serving = self._serve(target)
            undo.callback(self.serving.close)
            make_current(target)
            undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        for serving in (*self._leaving, self.serving):
            serving.close()
        self._events.close()

    def _run(self) -> None:
        while not self._stopped.wait(FOLLOW_S):
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
        return EngineFrontend(self._settings, target, self._name, self._stopped.is_set, self._on_ended)

    def _next_target(self) -> EngineTarget | None:
        now, has_failed = self.serving.target, self.serving.client.has_failed
        target = find_engine(self._model_dir)  # after: what it was before the failure does not count
        if has_failed:
            return target or (now if may_start(now) else None)
        if target is None or (target.folder, target.config) == (now.folder, now.config):
            return None
        is_older = target.folder == now.folder and target.read_ns < now.read_ns  # an engine has started again
        return None if is_older else target


class TritonPythonModel:
    """Triton model whose process holds a front end. Triton calls it from one thread."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        config = auto_complete_model_config
        try:
            return complete_entry(config, os.getppid()) or complete(config)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start or join the engine. Raise `TritonModelException` if the model cannot be served."""
        route_logging()
        if is_stub():
            protect_texts()
            close_inherited_connections()
        close_shared_memory()
        name, owner = args["model_instance_name"], ""
        log.info("%s: engine package %s", name, tidewheel.__file__)
        try:
            self._settings = settings = load_settings(args)
            if settings.owner is not settings.entry:  # whichever of the two fails first is reported
                owner = f"the engine of {settings.owner.name!r}: "
            self._called = CalledModel(settings.engine) if settings.engine.is_remote else None
            model_dir = engine_dir(settings.owner.folder.parent, settings.owner.name)
            self._follower = Follower(model_dir, settings, choose_engine(model_dir, settings.engine), name)
            self._presence = Presence(args["model_name"])  # last: it says that the front end has begun
        except (ConfigError, TidewheelError) as error:
            raise pb_utils.TritonModelException(f"{owner}{error}") from None
        except OSError as error:
            raise pb_utils.TritonModelException(f"{owner}a file of the model or the run directory: {error}") from None

    def is_ready(self) -> bool:
        """Return whether requests are accepted. Triton calls this hook."""
        return self._follower.serving.client.readiness.is_ready

    def execute(self, requests: Sequence[Any]) -> None:
        """Submit requests. Wait after each until the front end has room."""
        for request in requests:
            self._submit(request)
            self._follower.serving.frontend.gate.wait()

    def finalize(self) -> None:
        self._presence.remove()
        self._follower.close()
        kept_files.close()

    def _submit(self, request: Any) -> None:
        arrival_ns = time.monotonic_ns()
        request_id = request.request_id()  # Triton may free the request with its answer
        self._presence.count(1)
        sink = TritonSink(request.get_response_sender(), lambda: self._presence.count(-1))
        try:
            asked = self._read(request, sink, arrival_ns)
            with self._follower.lock:
                self._follower.serving.frontend.submit(asked, sink)
        except Exception as error:
            refusal = error if isinstance(error, TidewheelError) else InternalError(_NOT_SUBMITTED)
            if refusal is not error:
                log.exception("a request could not be submitted")
            self._follower.serving.frontend.refuse(request_id, sink, arrival_ns, refusal)

    def _read(self, request: Any, sink: TritonSink, arrival_ns: int) -> GenerateRequest:
        frontend, config = self._settings.frontend, self._follower.serving.target.config
        if config.kind != "text":
            call = None if self._called is None else ModelCall(self._called, request)
            stream = config.kind == "iterative" and self._settings.entry.decoupled
            return read_tensors(request, frontend, config.max_input_mb, arrival_ns, call, stream=stream)
        generate, sink.format = read_request(
            request,
            frontend,
            decoupled=self._settings.entry.decoupled,
            max_prompt_bytes=config.max_prompt_bytes,
            arrival_ns=arrival_ns,
        )
        return generate
