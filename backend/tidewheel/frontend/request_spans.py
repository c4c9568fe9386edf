"""OpenTelemetry spans of ended requests: ``text_completion demo ── queue ─ prefill ─ decode ─ send``."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from tidewheel.errors import ConfigError
from tidewheel.frontend.ended_requests import EndedRequest, wall_offset_ns
from tidewheel.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_OPERATIONS = {"generate": "text_completion", "embed": "embeddings"}
_SERVICE = "tidewheel"
_CLOSE_S = 2.0
_MISSING = (
    "otlp_traces_endpoint is set, and OpenTelemetry's packages are not installed: pip install 'tidewheel[tracing]'"
)

Attributes = dict[str, str | bool | int | float | list[str]]


class RequestSpans:
    """Exporter of one span per request and per stage, on its own thread, by the environment variables `OTEL_…`.

    A dead collector costs only spans.
    """

    name = "otlp_traces_endpoint"

    def __init__(self, endpoint: str, model: str) -> None:
        """Start the exporter. Raise `ConfigError` if OpenTelemetry's packages are missing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(_MISSING) from None
        resource = Resource.create(
            {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", _SERVICE), SERVICE_VERSION: __version__}
        )
        self._model = model
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._propagator = TraceContextTextMapPropagator()
        self._tracer: Tracer = self._provider.get_tracer(_SERVICE, __version__)

    def write(self, ended: list[EndedRequest]) -> None:
        wall_ns = wall_offset_ns()
        for one in ended:
            self._make(one, wall_ns)

    def close(self) -> None:
        """Export within two seconds."""
        sender = threading.Thread(target=self._provider.shutdown, name=self.name, daemon=True)
        sender.start()
        sender.join(_CLOSE_S)

    def _make(self, ended: EndedRequest, wall_ns: int) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        attributes = attributes_of(ended, self._model)
        root = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {self._model}",
            context=self._propagator.extract({"traceparent": ended.traceparent}),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=ended.arrival_ns + wall_ns,
        )
        if ended.tag:
            root.set_status(Status(StatusCode.ERROR, ended.tag))
        context = set_span_in_context(root)
        for name, (begin_ns, end_ns) in ended.stages().items():
            if begin_ns and end_ns:
                span: Span = self._tracer.start_span(name, context=context, start_time=begin_ns + wall_ns)
                span.end(max(begin_ns, end_ns) + wall_ns)
        root.end(ended.end_ns + wall_ns)


def attributes_of(ended: EndedRequest, model: str) -> Attributes:
    """Return a span's attributes, by OpenTelemetry's names for generative AI or ours."""
    attributes: dict[str, str | bool | int | float | list[str] | None] = {
        "gen_ai.operation.name": _OPERATIONS.get(ended.task, ended.task),
        "gen_ai.provider.name": _SERVICE,
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": ended.sequences,
        "gen_ai.response.id": ended.request_id,
        "gen_ai.response.finish_reasons": [ended.finish_reason] if ended.finish_reason else None,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        "gen_ai.usage.output_tokens": ended.output_tokens,
        "error.type": ended.tag,
        "tidewheel.class": ended.priority,
        "tidewheel.tenant": ended.tenant,
        "tidewheel.responses": ended.responses,
        "tidewheel.preemptions": ended.preemptions,
        "tidewheel.deadline_ms": ended.deadline_ms,
        "tidewheel.session": ended.session,
        "tidewheel.client_cancelled": ended.client_cancelled,
    }
    return {name: value for name, value in attributes.items() if value is not None and value != ""}
