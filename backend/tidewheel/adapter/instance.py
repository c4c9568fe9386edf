from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from tidewheel.adapter.io import read_request
from tidewheel.adapter.logs import log_engine_info, route_logging
from tidewheel.adapter.metrics import EngineMetrics, MetricsPublisher, RequestMetrics
from tidewheel.adapter.responder import TritonSink
from tidewheel.adapter.settings import ModelSettings, load_settings
from tidewheel.engine.client import EngineClient
from tidewheel.engine.messages import Delta, EngineInfo, Room
from tidewheel.engine.run_dir import engine_dir
from tidewheel.errors import InternalError, TidewheelError
from tidewheel.frontend.door import Door, HoldingDoor, RefusingDoor
from tidewheel.frontend.frontend import Frontend
from tidewheel.stats import EngineStats


class EngineRelay:
    """Listener that passes engine messages on to the front end, which is made later."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.frontend: Frontend | None = None
        self.stats: EngineStats | None = None

    def on_deltas(self, deltas: list[Delta]) -> None:
        if self.frontend is not None:
            self.frontend.on_deltas(deltas)

    def on_lost(self, keys: list[int], error: TidewheelError) -> None:
        if self.frontend is not None:
            self.frontend.on_lost(keys, error)
        else:
            self._door.hear(None)

    def on_room(self, room: Room) -> None:
        if self.frontend is not None:
            self.frontend.on_room(room)
        else:
            self._door.hear(room)

    def on_stats(self, stats: EngineStats) -> None:
        self.stats = stats


class ModelInstance:
    """Settings, engine client, front end and metrics of a Triton model instance. One thread calls `submit`."""

    def __init__(self, settings: ModelSettings, client: EngineClient, frontend: Frontend) -> None:
        self._settings = settings
        self._client = client
        self._frontend = frontend
        self._refused: Counter[str] = Counter()  # by tag, before the front end
        self._metrics: MetricsPublisher | None = None

    @classmethod
    def open(cls, args: Mapping[str, str]) -> ModelInstance:
        """Start or join the engine. Raise `ConfigError` if the model cannot be served."""
        route_logging()
        settings = load_settings(args)
        door = HoldingDoor() if settings.has_native_queue else RefusingDoor()
        relay = EngineRelay(door)
        client = EngineClient(
            engine_dir(settings.owner.repository, settings.owner.name),
            settings.engine,
            relay,
            name=f"{args['model_instance_name']}.{os.getpid()}",
        )
        try:
            info = client.start(settings.engine.engine_start_timeout_s)
            relay.frontend = Frontend(
                info,
                Path(settings.engine.tokenizer or info.model),
                client,
                max_prompt_bytes=settings.engine.max_prompt_bytes,
                door=door,
                num_senders=settings.frontend.num_sender_threads,
            )
        except BaseException:
            client.close()
            raise
        if client.is_owner:
            log_engine_info(info)
        instance = cls(settings, client, relay.frontend)
        if settings.frontend.REPORT_CUSTOM_METRICS:
            instance._publish_metrics(info, relay)
        return instance

    def submit(self, request: Any) -> None:
        """Pass a request on, or answer it with an error. Never raise, never block."""
        arrival_ns = time.monotonic_ns()
        sink = TritonSink(request.get_response_sender())
        try:
            generate, sink.format = read_request(
                request,
                decoupled=self._settings.decoupled,
                max_prompt_bytes=self._settings.engine.max_prompt_bytes,
                arrival_ns=arrival_ns,
            )
            self._frontend.submit(generate, sink)
        except TidewheelError as error:
            self._refuse(sink, error)
        except Exception:
            pb_utils.Logger.log_error(f"a request could not be submitted: {traceback.format_exc()}")
            self._refuse(sink, InternalError("the request could not be submitted; the server's log says why"))

    def wait_for_room(self) -> None:
        """Block while the engine's waiting set is full, if the entry uses Triton's queue."""
        self._frontend.wait_for_room()

    def close(self) -> None:
        """End live requests with an error, publish the last figures and leave the engine."""
        self._frontend.close()
        if self._metrics is not None:
            self._metrics.close()
        self._client.close()

    def _refuse(self, sink: TritonSink, error: TidewheelError) -> None:
        self._refused[error.tag] += 1
        sink.fail(error)

    def _publish_metrics(self, info: EngineInfo, relay: EngineRelay) -> None:
        requests = RequestMetrics(self._settings.entry.labels)
        engine = EngineMetrics(info, self._settings.owner.labels)

        def flush() -> None:
            requests.publish(self._frontend.stats(), self._refused)
            if relay.stats is None:
                return
            if self._client.is_owner:
                engine.publish(relay.stats)
            else:
                engine.follow(relay.stats)

        self._metrics = MetricsPublisher(flush)
