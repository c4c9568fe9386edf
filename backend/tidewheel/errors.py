"""Errors, one class per cause.

    TidewheelError
    ├── InvalidRequest      TW-INPUT         can never work
    │   └── PromptTooLarge  TW-TOO-LARGE     over a size limit, refused before any work
    ├── Unsupported         TW-UNSUPPORTED   known but not offered
    ├── NotFound            TW-NOT-FOUND
    ├── Busy                TW-BUSY          overload: try again after `retry_after_ms`
    │   └── WaitingSetFull                   until another request starts
    ├── Draining            TW-DRAINING      shutting down: try another server
    ├── DeadlineExceeded    TW-DEADLINE
    ├── Cancelled           TW-CANCELLED
    ├── EngineDead          TW-ENGINE-DEAD   the engine process is gone: safe to retry
    ├── SlowReader          TW-SLOW-READER   the client did not read its stream
    ├── NumericError        TW-NUMERIC       non-finite logits
    └── InternalError       TW-INTERNAL      a bug in Tidewheel
    ConfigError             wrong model settings: the load stops (never on the wire)

Every message to a client starts with the tag: ``[TW-BUSY retry_after_ms=250] waiting set is full: 512 of 512
requests``.
"""

from __future__ import annotations

import enum
import re
from typing import ClassVar


class Code(enum.StrEnum):
    """Status codes in Triton's names (`TRITONSERVER_ERROR_*`)."""

    INVALID_ARG = "INVALID_ARG"
    NOT_FOUND = "NOT_FOUND"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    UNSUPPORTED = "UNSUPPORTED"
    INTERNAL = "INTERNAL"


class TidewheelError(Exception):
    tag: ClassVar[str] = "TW-INTERNAL"
    code: ClassVar[Code] = Code.INTERNAL

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        hint = "" if self.retry_after_ms is None else f" retry_after_ms={self.retry_after_ms}"
        return f"[{self.tag}{hint}] {self.message}"


class InvalidRequest(TidewheelError):
    tag = "TW-INPUT"
    code = Code.INVALID_ARG


class PromptTooLarge(InvalidRequest):
    tag = "TW-TOO-LARGE"


class Unsupported(TidewheelError):
    tag = "TW-UNSUPPORTED"
    code = Code.UNSUPPORTED


class NotFound(TidewheelError):
    tag = "TW-NOT-FOUND"
    code = Code.NOT_FOUND


class Busy(TidewheelError):
    tag = "TW-BUSY"
    code = Code.UNAVAILABLE


class WaitingSetFull(Busy):
    pass


class Draining(TidewheelError):
    tag = "TW-DRAINING"
    code = Code.UNAVAILABLE


class DeadlineExceeded(TidewheelError):
    tag = "TW-DEADLINE"
    code = Code.UNAVAILABLE


class Cancelled(TidewheelError):
    tag = "TW-CANCELLED"
    code = Code.CANCELLED


class EngineDead(TidewheelError):
    tag = "TW-ENGINE-DEAD"
    code = Code.UNAVAILABLE


class SlowReader(TidewheelError):
    tag = "TW-SLOW-READER"
    code = Code.UNAVAILABLE


class NumericError(TidewheelError):
    tag = "TW-NUMERIC"


class InternalError(TidewheelError):
    pass


class ConfigError(Exception):
    """A wrong setting. The message says in one line what to change."""


_CLASSES: dict[str, type[TidewheelError]] = {
    cls.tag: cls
    for cls in (
        InvalidRequest, PromptTooLarge, Unsupported, NotFound, Busy, Draining, DeadlineExceeded,
        Cancelled, EngineDead, SlowReader, NumericError, InternalError,
    )
}  # fmt: skip

TAGS: frozenset[str] = frozenset(_CLASSES)

_TAGGED = re.compile(r"^\[(?P<tag>TW-[A-Z-]+)(?: retry_after_ms=(?P<retry>\d+))?\] (?P<message>.*)$", re.DOTALL)


def from_wire(tag: str, message: str, retry_after_ms: int | None = None) -> TidewheelError:
    """Return the error of a tag; `InternalError` if it is unknown."""
    cls = _CLASSES.get(tag)
    if cls is None:
        return InternalError(f"{tag}: {message}", retry_after_ms=retry_after_ms)
    return cls(message, retry_after_ms=retry_after_ms)


def parse(text: str) -> TidewheelError | None:
    """Invert ``str(error)``. Return None if there is no tag."""
    match = _TAGGED.match(text)
    if match is None:
        return None
    retry = match["retry"]
    return from_wire(match["tag"], match["message"], int(retry) if retry else None)
