from __future__ import annotations

from collections.abc import Callable

from tidewheel.adapter.repository_entry import ModelSettings
from tidewheel.frontend.ended_request import EndedRequest
from tidewheel.frontend.event_queue import EventQueue
from tidewheel.frontend.request_log import RequestLog
from tidewheel.frontend.request_spans import RequestSpans


class RequestEvents:
    """Where ended requests of an entry are told of: its log and its traces, each behind a queue."""

    def __init__(self, settings: ModelSettings) -> None:
        """Raise `ConfigError` for a file that cannot be written, or without the packages of traces."""
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
