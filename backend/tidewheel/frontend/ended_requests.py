"""Ended requests: their log, and their OpenTelemetry spans ``text_completion ── queue ─ prefill ─ decode ─ send``."""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tidewheel.errors import Cancelled, ConfigError, TidewheelError
from tidewheel.frontend.live_request import LiveRequest
from tidewheel.frontend.output import Response
from tidewheel.frontend.request_parameters import AnyTask
from tidewheel.frontend.settings import STDERR
from tidewheel.regular_files import open_descriptor
from tidewheel.request import FinishReason, Priority
from tidewheel.version import __version__
from tidewheel_process.locked_folder import is_at

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

MAX_EVENTS = 8192
FLUSH_S = 0.2
_STDERR_FD = 2
_MAX_ID_CHARS = 256
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NOCTTY
_WARN_S = 10.0
_NS_PER_MS = 1e6
_NOT_LOGGED = ("arrival_ns", "end_ns", "scheduled_ns", "first_token_ns", "last_token_ns", "traceparent")
_CLOSE_S = 2.0
_SERVICE = "tidewheel"
_OPERATIONS = {"generate": "text_completion", "embed": "embeddings"}
_ATTRIBUTES = {  # of spans, by field
    "sequences": "gen_ai.request.choice.count", "request_id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens", "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens", "tag": "error.type", "priority": "tidewheel.class",
    **{name: f"tidewheel.{name}" for name in ("tenant", "responses", "preemptions", "deadline_ms", "session")},
    "client_cancelled": "tidewheel.client_cancelled",
}  # fmt: skip

logger = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


def milliseconds(begin_ns: int, end_ns: int) -> float | None:
    """Return the milliseconds between two times, or None if one is 0."""
    return round((end_ns - begin_ns) / _NS_PER_MS, 3) if begin_ns and end_ns else None


class EndedRequest(msgspec.Struct, frozen=True):
    """Figures and labels of an ended request, named as in the log, without prompt and output.

    Times are monotonic ns, of the first sequence to begin and the last to end; 0: never, or unknown.
    """

    request_id: str
    arrival_ns: int
    end_ns: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    task: AnyTask = "generate"
    stream: bool = False
    priority: str | None = None  # granted class
    tenant: str = ""
    finish_reason: str | None = None  # None: an error
    tag: str | None = None  # of the error
    client_cancelled: bool = False
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: unknown
    output_tokens: int = 0
    sequences: int = 1
    responses: int = 0
    preemptions: int | None = None
    weights: str | None = None  # of the first sequence: full, quantized or mixed
    deadline_ms: float | None = None
    session: bool = False
    traceparent: str = ""  # empty: none

    def stages(self) -> dict[str, tuple[int, int]]:
        """Return begin and end of each stage by its name."""
        moments = (self.arrival_ns, self.scheduled_ns, self.first_token_ns, self.last_token_ns, self.end_ns)
        return dict(zip(("queue", "prefill", "decode", "send"), itertools.pairwise(moments), strict=True))

    @classmethod
    def of(
        cls, request: LiveRequest, end_ns: int, response: Response = (), error: TidewheelError | None = None
    ) -> "EndedRequest":
        stats = [chunk.stats for chunk in response if chunk.stats is not None]
        urgency, message, outputs = request.urgency, request.prepared.message, request.prepared.outputs
        priority = stats[0].priority if stats else urgency.priority
        reason = response[0].finish_reason if response else None
        return cls(
            request_id=request.asked.request_id,
            arrival_ns=request.arrival_ns,
            end_ns=end_ns,
            scheduled_ns=_least(one.first_scheduled_ns for one in stats),
            first_token_ns=_least(one.first_token_ns for one in stats) or request.first_output_ns,
            last_token_ns=max((one.last_token_ns for one in stats), default=0),
            task=request.asked.task,
            stream=request.asked.stream,
            priority=Priority(priority).name if priority else None,
            tenant=urgency.tenant,
            finish_reason=reason,
            tag=None if error is None else error.tag,
            client_cancelled=reason == FinishReason.CANCELLED or isinstance(error, Cancelled),
            prompt_tokens=0 if outputs is None else outputs.num_input_tokens,
            cached_tokens=stats[0].num_cached_tokens if stats else None,
            output_tokens=0 if outputs is None else sum(outputs.num_output_tokens),
            sequences=1 if message is None else message.options.n,
            responses=request.num_responses,
            preemptions=sum(one.num_preemptions for one in stats) if stats else None,
            weights=stats[0].weights if stats else None,
            deadline_ms=milliseconds(request.arrival_ns, request.deadline_ns),
            session=bool(urgency.session_id),
            traceparent=request.asked.traceparent,
        )


def _least(moments: Iterable[int]) -> int:
    return min((moment for moment in moments if moment), default=0)


def _line(model: str, ended: EndedRequest, wall_ns: int) -> dict[str, object]:
    fields = {name: value for name, value in msgspec.structs.asdict(ended).items() if name not in _NOT_LOGGED}
    moment = datetime.fromtimestamp((ended.end_ns + wall_ns) * 1e-9, UTC)
    return {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "model": model,
        **fields,
        "request_id": ended.request_id[:_MAX_ID_CHARS],
        **{f"{name}_ms": milliseconds(*moments) for name, moments in ended.stages().items() if name != "send"},
        "first_token_ms": milliseconds(ended.arrival_ns, ended.first_token_ns),
        "total_ms": milliseconds(ended.arrival_ns, ended.end_ns),
        "trace_id": trace_id(ended.traceparent) or None,
    }


def trace_id(traceparent: str) -> str:
    """Return the trace id of a W3C `traceparent` (`version-trace_id-parent_id-flags`); empty if malformed."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 and parts[1].isalnum() else ""


def wall_offset_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


class RequestLog:
    """Log of ended requests as JSON lines, in a file of mode 0600 that processes may share, or on standard error.

    A moved or removed file is opened again.
    """

    name = "request_log"

    def __init__(self, target: str, model: str) -> None:
        """Open the log. Raise `ConfigError` if the file cannot be written."""
        self._path = None if target == STDERR else Path(target)
        self._model = model
        self._is_torn = False  # the last write ended inside a line
        try:
            self._descriptor = _STDERR_FD if self._path is None else open_descriptor(self._path, _FLAGS)
        except OSError as error:
            raise ConfigError(f"request_log is {target!r}: it cannot be written ({error.strerror})") from None

    def write(self, ended: list[EndedRequest]) -> None:
        """Append a line for each request. Raise `OSError`."""
        if self._path is not None and not is_at(self._descriptor, self._path):
            descriptor = open_descriptor(self._path, _FLAGS)
            os.close(self._descriptor)
            self._descriptor, self._is_torn = descriptor, False
        wall_ns = wall_offset_ns()
        lines = b"".join(_encoder.encode(_line(self._model, one, wall_ns)) + b"\n" for one in ended)
        data = b"\n" + lines if self._is_torn else lines
        num_written = os.write(self._descriptor, data)
        self._is_torn = data[:num_written][-1:] not in (b"", b"\n")
        if num_written < len(data):
            raise OSError(f"{num_written} of {len(data)} bytes were written")

    def close(self) -> None:
        if self._path is not None:
            os.close(self._descriptor)


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
            raise ConfigError(
                f"{self.name} is set, and OpenTelemetry is not installed: pip install 'tidewheel[tracing]'"
            ) from None
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


def attributes_of(ended: EndedRequest, model: str) -> dict[str, str | int | float | list[str]]:
    """Return a span's attributes, by OpenTelemetry's names for generative AI or ours."""
    values = {name: getattr(ended, field) for field, name in _ATTRIBUTES.items()} | {
        "gen_ai.operation.name": _OPERATIONS.get(ended.task, ended.task),
        "gen_ai.provider.name": _SERVICE,
        "gen_ai.request.model": model,
        "gen_ai.response.finish_reasons": [ended.finish_reason] if ended.finish_reason else None,
    }
    return {name: value for name, value in values.items() if value not in (None, "")}


class EventQueue:
    """Bounded queue of ended requests in front of a slow consumer; `put` never waits.

    A thread calls `consume` every `FLUSH_S` seconds and at `close`, and logs losses.
    """

    def __init__(self, name: str, consume: Callable[[list[EndedRequest]], None]) -> None:
        self.num_lost = 0
        self._name = name
        self._consume = consume
        self._lock = threading.Lock()
        self._events: list[EndedRequest] = []
        self._problem = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, event: EndedRequest) -> None:
        with self._lock:
            if len(self._events) < MAX_EVENTS:
                self._events.append(event)
            else:
                self.num_lost += 1
                self._problem = f"more than {MAX_EVENTS} wait"

    def close(self, timeout_s: float = 5.0) -> None:
        """Pass on the remaining events, within `timeout_s`."""
        self._stopped.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_last, num_reported, next_warning = False, 0, 0.0
        while not is_last:
            is_last = self._stopped.wait(FLUSH_S)
            self._flush()
            num_new, now = self.num_lost - num_reported, time.monotonic()
            if num_new and (is_last or now >= next_warning):
                logger.warning("%s: %d were lost (%s)", self._name, num_new, self._problem)
                num_reported, next_warning = num_reported + num_new, now + _WARN_S

    def _flush(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        if not events:
            return
        try:
            self._consume(events)
        except Exception as error:
            with self._lock:
                self.num_lost += len(events)
                self._problem = str(error)
