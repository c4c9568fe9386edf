"""The request log: one JSON line for each request that ended. Times are in milliseconds."""

from __future__ import annotations

import os
import stat
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tidewheel.errors import ConfigError
from tidewheel.frontend.ended_request import EndedRequest
from tidewheel.request import Priority

STDERR = "stderr"
_STDERR_FD = 2
_MAX_ID_CHARS = 256
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC

_encoder = msgspec.json.Encoder()


class Line(msgspec.Struct, frozen=True, kw_only=True):
    time: str  # UTC, of the end
    model: str
    request_id: str
    task: str
    stream: bool
    priority: str | None  # class; None: the request could not be read
    tenant: str
    finish_reason: str | None
    tag: str | None
    client_cancelled: bool
    queue_ms: float | None  # from the arrival to the first step
    prefill_ms: float | None
    first_token_ms: float | None  # from the arrival
    decode_ms: float | None
    total_ms: float | None
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    sequences: int
    responses: int
    preemptions: int | None
    deadline_ms: float | None
    session: bool
    trace_id: str | None

    @classmethod
    def of(cls, model: str, ended: EndedRequest, wall_ns: int) -> Line:
        """`wall_ns`: what to add to the monotonic clock for the time since 1970."""
        moment = datetime.fromtimestamp((ended.stages.end_ns + wall_ns) * 1e-9, UTC)
        return cls(
            time=moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            model=model,
            request_id=ended.request_id[:_MAX_ID_CHARS],
            task=ended.task,
            stream=ended.is_streamed,
            priority=Priority(ended.priority).name if ended.priority else None,
            tenant=ended.tenant,
            finish_reason=ended.finish_reason or None,
            tag=ended.tag or None,
            client_cancelled=ended.is_cancelled,
            queue_ms=ended.stages.queue_ms,
            prefill_ms=ended.stages.prefill_ms,
            first_token_ms=ended.stages.time_to_first_token_ms,
            decode_ms=ended.stages.decode_ms,
            total_ms=ended.stages.total_ms,
            prompt_tokens=ended.num_prompt_tokens,
            cached_tokens=ended.num_cached_tokens,
            output_tokens=ended.num_output_tokens,
            sequences=ended.num_sequences,
            responses=ended.num_responses,
            preemptions=ended.num_preemptions,
            deadline_ms=ended.deadline_ms,
            session=ended.has_session,
            trace_id=trace_id(ended.traceparent) or None,
        )


def trace_id(traceparent: str) -> str:
    """Return the trace id of W3C's `version-trace_id-parent_id-flags`; empty for anything else."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 and parts[1].isalnum() else ""


def wall_offset_ns() -> int:
    """Return what to add to the monotonic clock for the time since 1970."""
    return time.time_ns() - time.monotonic_ns()


class RequestLog:
    """File, made with mode 0600, or the error output. A file that was moved or removed is opened again.

    Lines are appended whole, so that several processes may share a file.
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
        """Raise `OSError` if not all of it was written."""
        if self._path is not None and not _is_at(self._path, self._descriptor):
            descriptor = _open(self._path)
            os.close(self._descriptor)
            self._descriptor, self._is_torn = descriptor, False
        wall_ns = wall_offset_ns()
        lines = b"".join(_encoder.encode(Line.of(self._model, one, wall_ns)) + b"\n" for one in ended)
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
