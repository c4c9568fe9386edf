from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

import tidewheel
from tidewheel.adapter.logs import route_logging
from tidewheel.adapter.metrics import EngineMetrics, MetricsPublisher, RequestMetrics
from tidewheel.adapter.repository_entry import ModelSettings, load_settings
from tidewheel.adapter.request_tensors import read_request
from tidewheel.adapter.responder import TritonSink
from tidewheel.adapter.tensors import complete
from tidewheel.config import EngineConfig
from tidewheel.engine.engine_client import EngineClient
from tidewheel.engine.folder import engine_dir
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError, InternalError, TidewheelError
from tidewheel.frontend.door import HoldingDoor, RefusingDoor
from tidewheel.frontend.frontend import NUM_TOKENIZERS, EngineRelay, Frontend
from tidewheel.frontend.model_files import GenerationDefaults
from tidewheel.frontend.preparation import RequestReader
from tidewheel.frontend.prompt_process import Folder
from tidewheel.frontend.prompt_workers import PromptWorkers
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.private_dir import close_shared_memory

log = logging.getLogger(__name__)


class TritonPythonModel:
    """One front end. Triton runs each instance in its own process, and calls it from one thread."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        try:
            return complete(auto_complete_model_config)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start or join the engine. Raise `TritonModelException` if the model cannot be served."""
        route_logging()
        close_shared_memory()
        name = args["model_instance_name"]
        log.info("%s: engine package %s", name, tidewheel.__file__)
        try:
            self._settings = load_settings(args)
            self._open(name)
        except (ConfigError, TidewheelError) as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: Sequence[Any]) -> None:
        """Submit requests, and return when one more may come. Until then they wait in Triton's queue."""
        for request in requests:
            self._submit(request)
            self._frontend.wait_for_room()

    def finalize(self) -> None:
        self._frontend.close()
        if self._metrics is not None:
            self._metrics.close()
        self._client.close()

    def _open(self, name: str) -> None:
        settings, owner = self._settings, self._settings.owner
        door = HoldingDoor() if settings.has_native_queue else RefusingDoor()
        relay = EngineRelay(door)
        folder = engine_dir(owner.repository, owner.name)
        self._client = EngineClient(folder, settings.engine, relay, name=f"{name}.{os.getpid()}")
        try:
            info = self._client.start(settings.engine.engine_start_timeout_s)
            self._frontend = relay.frontend = Frontend(
                info,
                _make_reader(settings, info),
                self._client,
                max_prompt_bytes=settings.engine.max_prompt_bytes,
                door=door,
                num_senders=settings.frontend.num_sender_threads,
                on_finished=self._publish_finished,
            )
        except BaseException:
            self._client.close()
            raise
        if self._client.is_owner:
            for line in info.describe():
                log.info("%s", line)
        self._refused: Counter[str] = Counter()  # by tag, before the front end
        self._metrics = self._publish_metrics(settings, info, relay) if settings.has_metrics else None

    def _submit(self, request: Any) -> None:
        """Pass a request on, or answer it with an error."""
        arrival_ns = time.monotonic_ns()
        sink = TritonSink(request.get_response_sender())
        try:
            generate, sink.format = read_request(
                request,
                decoupled=self._settings.decoupled,
                max_prompt_bytes=self._settings.engine.max_prompt_bytes,
                max_request_s=self._settings.frontend.max_request_s,
                arrival_ns=arrival_ns,
                dialect=self._settings.frontend.io_dialect,
            )
            self._frontend.submit(generate, sink)
        except TidewheelError as error:
            self._refuse(sink, error)
        except Exception:
            log.exception("a request could not be submitted")
            self._refuse(sink, InternalError("the request could not be submitted; the server's log says why"))

    def _refuse(self, sink: TritonSink, error: TidewheelError) -> None:
        self._refused[error.tag] += 1
        sink.fail(error)

    def _publish_metrics(self, settings: ModelSettings, info: EngineInfo, relay: EngineRelay) -> MetricsPublisher:
        requests = RequestMetrics(settings.entry.labels, self._frontend.stats())
        engine = EngineMetrics(info, settings.owner.labels)

        def publish(is_due: bool) -> None:
            stats = self._frontend.stats()
            is_due = is_due or not stats.num_live
            requests.publish(stats, self._refused, with_tokens=is_due)
            if relay.stats is None or not is_due:
                return
            if self._client.is_owner:
                engine.publish(relay.stats)
            else:
                engine.follow(relay.stats)

        return MetricsPublisher(publish)

    def _publish_finished(self) -> None:
        """Publish figures of a request, so that its client sees them; those of single tokens and steps when idle."""
        if self._metrics is not None:
            self._metrics.flush()


def _make_reader(settings: ModelSettings, info: EngineInfo) -> RequestReader:
    """Raise `ConfigError` without a usable tokenizer."""
    config = settings.engine
    folder = Folder(Path(config.tokenizer or info.model), info.vocab_size, config.max_prompt_bytes)
    encoder = PromptWorkers(folder, NUM_TOKENIZERS)
    try:
        encoder.wait_tried()  # before this process reads the same files
        return RequestReader(
            info,
            Tokenizer.load(folder.path, vocab_size=info.vocab_size),
            encoder,
            max_prompt_bytes=config.max_prompt_bytes,
            default_max_tokens=settings.frontend.default_max_tokens,
            defaults=_load_defaults(info, config),
        )
    except BaseException:
        encoder.close()
        raise


def _load_defaults(info: EngineInfo, config: EngineConfig) -> GenerationDefaults:
    """Sample as Triton's vLLM backend does, which reads no `generation_config.json`, unless a setting asks for it."""
    return GenerationDefaults.load(
        Path(info.model), config.generation_config or "vllm", config.override_generation_config
    )
