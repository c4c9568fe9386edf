"""Front ends of a model instance: one, or while settings change the new one and those that still have requests."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from pathlib import Path

from tidewheel.adapter.metrics import EngineMetrics, MetricsPublisher, RequestMetrics
from tidewheel.adapter.repository_entry import ModelSettings
from tidewheel.engine.engine_client import EngineClient
from tidewheel.engine.folder import Place
from tidewheel.engine.messages import EngineInfo
from tidewheel.engine.placement import find_place
from tidewheel.errors import ConfigError, TidewheelError
from tidewheel.frontend.door import HoldingDoor, RefusingDoor
from tidewheel.frontend.frontend import EngineRelay, Frontend

log = logging.getLogger(__name__)

FOLLOW_S = 1.0


class Serving:
    """A front end of one engine, with its metrics."""

    def __init__(self, settings: ModelSettings, place: Place, name: str) -> None:
        """Start or join the engine. Raise `ConfigError` or a `TidewheelError` if it cannot serve."""
        self.place = place
        self.refused: Counter[str] = Counter()  # by tag, before the front end
        door = HoldingDoor() if settings.has_native_queue else RefusingDoor()
        self._relay = relay = EngineRelay(door)
        self._client = EngineClient(place, relay, name=f"{name}.{os.getpid()}")
        try:
            info = self._client.start(place.config.engine_start_timeout_s)
            self.frontend = relay.frontend = Frontend(
                info,
                Path(place.config.tokenizer or info.model),
                self._client,
                max_prompt_bytes=place.config.max_prompt_bytes,
                door=door,
                num_senders=settings.frontend.num_sender_threads,
            )
        except BaseException:
            self._client.close()
            raise
        if self._client.is_owner:
            for line in info.describe():
                log.info("%s", line)
        self._metrics = self._publish_metrics(settings, info) if settings.frontend.REPORT_CUSTOM_METRICS else None

    def close(self) -> None:
        self.frontend.close()
        if self._metrics is not None:
            self._metrics.close()
        self._client.close()

    def _publish_metrics(self, settings: ModelSettings, info: EngineInfo) -> MetricsPublisher:
        requests = RequestMetrics(settings.entry.labels)
        engine = EngineMetrics(info, settings.owner.labels)

        def flush() -> None:
            requests.publish(self.frontend.stats(), self.refused)
            if self._relay.stats is None:
                return
            if self._client.is_owner:
                engine.publish(self._relay.stats)
            else:
                engine.follow(self._relay.stats)

        return MetricsPublisher(flush)


class Follower:
    """Thread that follows the engine and the settings that serve the model.

    Another load may change both, of this entry or of one that shares its engine. New requests go to the new engine or
    settings; those in flight end where they are.
    """

    def __init__(self, model_dir: Path, settings: ModelSettings, place: Place, name: str) -> None:
        self.lock = threading.Lock()  # held to submit to `serving`, so that it is not closed meanwhile
        self.serving = Serving(settings, place, name)
        self._model_dir = model_dir
        self._settings = settings
        self._name = name
        self._leaving: list[Serving] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        for serving in (*self._leaving, self.serving):
            serving.close()

    def _run(self) -> None:
        while not self._stopped.wait(FOLLOW_S):
            try:
                self._follow()
            except (ConfigError, TidewheelError, OSError) as error:
                log.warning("%s cannot follow to other settings: %s", self._name, error)

    def _follow(self) -> None:
        for serving in [serving for serving in self._leaving if serving.frontend.is_idle]:
            self._leaving.remove(serving)
            serving.close()
        place, now = find_place(self._model_dir), self.serving.place
        if place is None or (place.folder, place.config) == (now.folder, now.config):
            return
        serving = Serving(self._settings, place, self._name)
        with self.lock:
            self._leaving.append(self.serving)
            self.serving = serving
        log.info("%s follows to engine %s", self._name, place.folder.name)
