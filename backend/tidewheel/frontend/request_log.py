"""Request log: a JSON line for each request that ended, and the queue before a slow log or collector."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from tidewheel.errors import ConfigError
from tidewheel.frontend.live_request import EndedRequest, milliseconds
from tidewheel.request import Priority

STDERR = "stderr"
_STDERR_FD = 2
_MAX_ID_CHARS = 256
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC

T = TypeVar("T")
MAX_EVENTS = 8192
FLUSH_S = 0.2
_WARN_S = 10.0

logger = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


def _line(model: str, ended: EndedRequest, wall_ns: int) -> dict[str, object]:
    """Return an entry of the log. Fields with `_ms` are durations; null: never, or unknown."""
    stages = ended.stages
    moment = datetime.fromtimestamp((stages.end_ns + wall_ns) * 1e-9, UTC)
    return {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "model": model,
        "request_id": ended.request_id[:_MAX_ID_CHARS],
        "task": ended.task,
        "stream": ended.is_streamed,
        "priority": Priority(ended.priority).name if ended.priority else None,
        "tenant": ended.tenant,
        "finish_reason": ended.finish_reason or None,
        "tag": ended.tag or None,
        "client_cancelled": ended.is_cancelled,
        "queue_ms": milliseconds(stages.arrival_ns, stages.scheduled_ns),
        "prefill_ms": milliseconds(stages.scheduled_ns, stages.first_token_ns),
        "first_token_ms": milliseconds(stages.arrival_ns, stages.first_token_ns),
        "decode_ms": milliseconds(stages.first_token_ns, stages.last_token_ns),
        "total_ms": milliseconds(stages.arrival_ns, stages.end_ns),
        "prompt_tokens": ended.num_prompt_tokens,
        "cached_tokens": ended.num_cached_tokens,
        "output_tokens": ended.num_output_tokens,
        "sequences": ended.num_sequences,
        "responses": ended.num_responses,
        "preemptions": ended.num_preemptions,
        "deadline_ms": ended.deadline_ms,
        "session": ended.has_session,
        "trace_id": trace_id(ended.traceparent) or None,
    }


def trace_id(traceparent: str) -> str:
    """Return the trace id of W3C's `version-trace_id-parent_id-flags`; empty for another text."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 and parts[1].isalnum() else ""


def wall_offset_ns() -> int:
    """Return the difference from the monotonic clock to the time since 1970."""
    return time.time_ns() - time.monotonic_ns()


class RequestLog:
    """Log in a file of mode 0600, which processes may share, or on the error output.

    A file that was moved or removed is opened again.
    """

    name = "request_log"

    def __init__(self, target: str, model: str) -> None:
        """Raise `ConfigError` if the file cannot be written."""
        self._path = None if target == STDERR else Path(target)
        self._model = model
        self._is_torn = False  # the last write ended inside a line
        try:
            self._descriptor = _STDERR_FD if self._path is None else _open(self._path)
        except OSError as error:
            raise ConfigError(f"request_log is {target!r}: it cannot be written ({error.strerror})") from None

    def write(self, ended: list[EndedRequest]) -> None:
        """Raise `OSError`."""
        if self._path is not None and not _is_at(self._path, self._descriptor):
            descriptor = _open(self._path)
            os.close(self._descriptor)
            self._descriptor, self._is_torn = descriptor, False
        wall_ns = wall_offset_ns()
        lines = b"".join(_encoder.encode(_line(self._model, one, wall_ns)) + b"\n" for one in ended)
        self._write(b"\n" + lines if self._is_torn else lines)

    def close(self) -> None:
        if self._path is not None:
            os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        num_written = os.write(self._descriptor, data)
        self._is_torn = data[:num_written][-1:] not in (b"", b"\n")
        if num_written < len(data):
            raise OSError(f"{num_written} of {len(data)} bytes were written")


def _open(path: Path) -> int:
    descriptor = os.open(path, _FLAGS, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is not a regular file", str(path))
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    opened = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)


class EventQueue(Generic[T]):
    """Bounded queue before a slow consumer.

    `put` never waits. A thread passes events on, every `interval_s` and at the end. Lost events are logged.
    """

    def __init__(
        self,
        name: str,
        consume: Callable[[list[T]], None],
        *,
        max_events: int = MAX_EVENTS,
        interval_s: float = FLUSH_S,
    ) -> None:
        self.num_lost = 0
        self._name = name
        self._consume = consume
        self._max_events = max_events
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._events: list[T] = []
        self._num_reported = 0
        self._next_warning = 0.0
        self._problem = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, event: T) -> None:
        with self._lock:
            if len(self._events) < self._max_events:
                self._events.append(event)
            else:
                self.num_lost += 1
                self._problem = f"more than {self._max_events} wait"

    def close(self, timeout_s: float = 5.0) -> None:
        """Pass on the rest, for at most `timeout_s`."""
        self._stopped.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(self._interval_s)
            self._flush()
            self._warn(is_due=is_last)

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

    def _warn(self, *, is_due: bool) -> None:
        now = time.monotonic()
        if self.num_lost > self._num_reported and (is_due or now >= self._next_warning):
            logger.warning("%s: %d were lost (%s)", self._name, self.num_lost - self._num_reported, self._problem)
            self._num_reported, self._next_warning = self.num_lost, now + _WARN_S
