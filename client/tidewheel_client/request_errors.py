"""Errors of requests, one class per cause.

    RequestError
    ├── InvalidRequest      TW-INPUT         can never work as sent
    │   └── PromptTooLarge  TW-TOO-LARGE
    ├── Unsupported         TW-UNSUPPORTED   known, but not offered
    ├── NotFound            TW-NOT-FOUND     no such model or session
    ├── Busy                TW-BUSY          overload: retry after `retry_after_ms`
    │   └── KvCacheFull     TW-KV-FULL       the KV cache is what is full
    ├── Draining            TW-DRAINING      shutting down: try another server
    ├── DeadlineExceeded    TW-DEADLINE      the request's `deadline_ms` passed
    ├── Cancelled           TW-CANCELLED
    ├── EngineDead          TW-ENGINE-DEAD   the engine process is gone: safe to retry
    ├── NumericError        TW-NUMERIC       the model produced non-finite logits
    ├── WrongKey            TW-KEY           the gateway does not know the API key
    ├── InternalError       TW-INTERNAL      server bug
    ├── ServerUnavailable   (no tag)         unreachable, or connection lost
    └── RequestTimeout      (no tag)         this client's `timeout_s` passed

Server messages start with a tag, `[TW-BUSY retry_after_ms=250] …`. Triton's own differ by gRPC status or text.
"""

from __future__ import annotations

import re
from typing import ClassVar

import grpc


class RequestError(Exception):
    """Base of all errors of this package; `message` excludes the tag."""

    tag: ClassVar[str] = ""
    retryable: ClassVar[bool] = False  # a retry may succeed and repeats no work

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms

    @property
    def label(self) -> str:
        """Tag, or the name of a class without one."""
        return self.tag or type(self).__name__

    def __str__(self) -> str:
        if not self.tag:
            return self.message
        hint = "" if self.retry_after_ms is None else f" retry_after_ms={self.retry_after_ms}"
        return f"[{self.tag}{hint}] {self.message}"


class InvalidRequest(RequestError):
    tag = "TW-INPUT"


class PromptTooLarge(InvalidRequest):
    tag = "TW-TOO-LARGE"


class Unsupported(RequestError):
    tag = "TW-UNSUPPORTED"


class NotFound(RequestError):
    tag = "TW-NOT-FOUND"


class Busy(RequestError):
    tag = "TW-BUSY"
    retryable = True


class KvCacheFull(Busy):
    tag = "TW-KV-FULL"


class Draining(RequestError):
    tag = "TW-DRAINING"
    retryable = True


class DeadlineExceeded(RequestError):
    tag = "TW-DEADLINE"


class Cancelled(RequestError):
    tag = "TW-CANCELLED"


class EngineDead(RequestError):
    tag = "TW-ENGINE-DEAD"
    retryable = True


class NumericError(RequestError):
    tag = "TW-NUMERIC"


class WrongKey(RequestError):
    tag = "TW-KEY"


class InternalError(RequestError):
    tag = "TW-INTERNAL"


class ServerUnavailable(RequestError):
    retryable = True


class RequestTimeout(RequestError):
    pass


BY_TAG: dict[str, type[RequestError]] = {
    cls.tag: cls
    for cls in (
        InvalidRequest, PromptTooLarge, Unsupported, NotFound, Busy, KvCacheFull, Draining,
        DeadlineExceeded, Cancelled, EngineDead, NumericError, WrongKey, InternalError,
    )
}  # fmt: skip

_BY_STATUS: dict[grpc.StatusCode, type[RequestError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: PromptTooLarge,
}

_BY_HTTP_STATUS: dict[int, type[RequestError]] = {
    401: Unsupported,
    403: Unsupported,
    404: NotFound,
    413: PromptTooLarge,
    502: ServerUnavailable,
    503: ServerUnavailable,
    504: ServerUnavailable,
}

# Triton's messages without a status, or with INTERNAL.
_BY_TEXT: tuple[tuple[str, type[RequestError]], ...] = (
    ("has no available versions", ServerUnavailable),  # shutting down
    ("unknown model", NotFound),
    ("is not ready", NotFound),
    ("Exceeds maximum queue size", Busy),
    ("is not healthy", ServerUnavailable),
)

_LOST = ("Stream removed", "Socket closed", "Connection reset", "Broken pipe", "GOAWAY")  # of gRPC's library
_LOST_AS_SENT = "Internal error from Core"  # of the same in asyncio, if a request cannot be written
_RESTRICTED = "is restricted, expecting header"
_TAGGED = re.compile(r"\[(?P<tag>TW-[A-Z-]+)(?: retry_after_ms=(?P<retry>\d+))?\] (?P<message>.*)\Z", re.DOTALL)


def from_text(text: str) -> RequestError:
    return _from_tagged(text) or _first_match(text)(text)


def from_rpc(error: grpc.RpcError, url: str) -> RequestError:
    text = error.details() or ""
    if _RESTRICTED in text:
        return Unsupported(
            f"{text}: ask the server's operator; tidewheel serve --open-api opens what serve itself closes"
        )
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestTimeout("the time limit of the request has passed")
    if text.startswith("failed to connect"):
        return ServerUnavailable(f"no server answers at {url}")
    if text.startswith(("errors resolving", "DNS resolution failed")):
        return ServerUnavailable(f"no such host: {url}")
    is_lost = error.code() is grpc.StatusCode.UNAVAILABLE and any(words in text for words in _LOST)
    if is_lost or (error.code() is grpc.StatusCode.INTERNAL and text == _LOST_AS_SENT):
        return ServerUnavailable(f"the connection to {url} was lost ({text})")
    cls = _BY_STATUS.get(error.code()) or _first_match(text)
    return _from_tagged(text) or cls(text or f"the call failed with {error.code().name}")


def from_http(status: int, text: str) -> RequestError:
    """Return the error of an answer by HTTP, whose status says little: 400 is Triton's for almost all."""
    found = from_text(text)
    if type(found) is RequestError and status in _BY_HTTP_STATUS:
        return _BY_HTTP_STATUS[status](text or f"the server answered with HTTP status {status}")
    return found if text else RequestError(f"the server answered with HTTP status {status}")


def _from_tagged(text: str) -> RequestError | None:
    match = _TAGGED.search(text)
    if match is None:
        return None
    retry = int(match["retry"]) if match["retry"] else None
    cls = BY_TAG.get(match["tag"])
    if cls is None:
        return InternalError(f"{match['tag']}: {match['message']}", retry_after_ms=retry)
    return cls(match["message"], retry_after_ms=retry)


def _first_match(text: str) -> type[RequestError]:
    return next((cls for part, cls in _BY_TEXT if part in text), RequestError)
