from __future__ import annotations

import contextlib
import json

import grpc

from tidewheel_client import errors
from tidewheel_client.errors import RequestError, ServerUnavailable, from_tagged

_BY_GRPC_STATUS: dict[str, type[RequestError]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "NOT_FOUND": errors.NotFound,
    "UNIMPLEMENTED": errors.Unsupported,
    "UNAVAILABLE": ServerUnavailable,
    "CANCELLED": errors.Cancelled,
    "RESOURCE_EXHAUSTED": errors.PromptTooLarge,
}

_BY_HTTP_STATUS: dict[int, type[RequestError]] = {
    **dict.fromkeys((401, 403), errors.Unsupported),
    404: errors.NotFound,
    413: errors.PromptTooLarge,
    **dict.fromkeys((502, 503, 504), ServerUnavailable),
}

# Triton's messages without a status, or with INTERNAL.
_BY_TEXT: tuple[tuple[str, type[RequestError]], ...] = (
    ("has no available versions", ServerUnavailable),  # shutting down
    ("unknown model", errors.NotFound),
    ("is not ready", errors.NotFound),
    ("Exceeds maximum queue size", errors.Busy),
    ("is not healthy", ServerUnavailable),
    ("unexpected inference input", errors.InvalidRequest),
    ("missing required input", errors.InvalidRequest),
)

_LOST = ("Stream removed", "Socket closed", "Connection reset", "Broken pipe", "GOAWAY")  # by gRPC
_LOST_AS_SENT = "Internal error from Core"  # by grpc.aio for an unwritten request
_RESTRICTED = "is restricted, expecting header"


def from_text(text: str) -> RequestError:
    return from_tagged(text) or _class_of_text(text)(text)


def from_rpc(error: grpc.RpcError, url: str) -> RequestError:
    text, status = error.details() or "", error.code().name
    if _RESTRICTED in text:
        return errors.Unsupported(
            f"{text}: ask the server's operator; tidewheel serve --open-api opens what serve itself closes"
        )
    if status == "DEADLINE_EXCEEDED":
        return errors.RequestTimeout("the time limit of the request has passed")
    if text.startswith("failed to connect"):
        return ServerUnavailable(f"no server answers at {url}")
    if text.startswith(("errors resolving", "DNS resolution failed")):
        return ServerUnavailable(f"no such host: {url}")
    is_lost = status == "UNAVAILABLE" and any(words in text for words in _LOST)
    if is_lost or (status == "INTERNAL" and text == _LOST_AS_SENT):
        return ServerUnavailable(f"the connection to {url} was lost ({text})")
    cls = _BY_GRPC_STATUS.get(status) or _class_of_text(text)
    return from_tagged(text) or cls(text or f"the call failed with {status}")


def from_http(status: int, body: str) -> RequestError:
    """Return the error of an HTTP answer. Its text decides before its status: Triton answers 400 to most errors."""
    text = body.strip()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text.removeprefix("data:"))["error"])
    found = from_text(text)
    if type(found) is RequestError and status in _BY_HTTP_STATUS:
        return _BY_HTTP_STATUS[status](text or f"the server answered with HTTP status {status}")
    return found if text else RequestError(f"the server answered with HTTP status {status}")


def _class_of_text(text: str) -> type[RequestError]:
    return next((cls for part, cls in _BY_TEXT if part in text), RequestError)
