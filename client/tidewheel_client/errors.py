"""Errors of requests, one class per cause, for the engine, the gateway and the clients.

A server's message starts with the tag: ``[TW-BUSY retry_after_ms=250] waiting set is full: …``. Docstrings of classes
with a tag, cause and remedy, make `docs/errors.md`.
"""

import contextlib
import json
import re
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:  # the engine needs errors, perhaps without gRPC
    import grpc

# Names of Triton's status codes, `TRITONSERVER_ERROR_*`.
Code = Literal["INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "UNSUPPORTED", "INTERNAL"]


class RequestError(Exception):
    """Base class of request errors; `message` excludes the tag."""

    tag: ClassVar[str] = ""
    code: ClassVar[Code] = "INTERNAL"
    retryable: ClassVar[bool] = False  # a retry may succeed and repeats no work

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms

    @property
    def label(self) -> str:
        """Tag of the error, or its class name without a tag."""
        return self.tag or type(self).__name__

    def __str__(self) -> str:
        if not self.tag:
            return self.message
        hint = "" if self.retry_after_ms is None else f" retry_after_ms={self.retry_after_ms}"
        return f"[{self.tag}{hint}] {self.message}"


class InvalidRequest(RequestError):
    """The request can never work: a field is missing, malformed, out of range, contradictory or unknown.

    Change what the message names. The same request fails again.
    """

    tag = "TW-INPUT"
    code = "INVALID_ARG"


class PromptTooLarge(InvalidRequest):
    """The prompt is longer than `max_prompt_bytes`, the context, the KV cache or `max_waiting_tokens` allows.

    Send a shorter prompt, or raise the limit that the message names.
    """

    tag = "TW-TOO-LARGE"


class Unsupported(RequestError):
    """The request asks for a known feature that is not offered, such as beam search or a grammar with look-around.

    Leave the field out, or set it to a value that asks for nothing.
    """

    tag = "TW-UNSUPPORTED"
    code = "UNSUPPORTED"


class NotFound(RequestError):
    """`close_session` names a session that was never kept, has expired, was closed or was evicted, or a request names
    an unknown adapter, or the missing folder of one.

    Nothing has to be done for the session, which keeps no memory. Correct the name or the folder of the adapter.
    """

    tag = "TW-NOT-FOUND"
    code = "NOT_FOUND"


class Busy(RequestError):
    """Too much to do: the waiting set or a queue is full, a tenant's rate is used up, or the breaker is open.

    Nothing was computed. Send the request again after `retry_after_ms`, or to another server.
    """

    tag = "TW-BUSY"
    code = "UNAVAILABLE"
    retryable = True


class WaitingSetFull(Busy):
    """The waiting set is full. Room is made as soon as another request starts."""


class KvCacheFull(WaitingSetFull):
    """The waiting set is full, and its first request waits for blocks of the KV cache, not for a row.

    Nothing was computed. Send the request again after `retry_after_ms`. If it happens often, raise
    `gpu_memory_utilization` or `kv_cache_memory_mb`, use `kv_cache_dtype`, or allow shorter prompts and outputs.
    """

    tag = "TW-KV-FULL"


class Draining(RequestError):
    """The server is shutting down and takes no new requests.

    Nothing was computed, or the request was cut off at the end of the drain time. Send it to another server.
    """

    tag = "TW-DRAINING"
    code = "UNAVAILABLE"
    retryable = True


class DeadlineExceeded(RequestError):
    """`deadline_ms`, Triton's `timeout` or `max_request_s` passed before the start, or is too near for a first token.

    Allow more time, ask for a higher class, or add capacity. A request that ran ends with `finish_reason` `deadline`.
    With `objective_action` `refuse`, a request that would miss `ttft_ms` or `tpot_ms` is refused too.
    """

    tag = "TW-DEADLINE"
    code = "UNAVAILABLE"


class Cancelled(RequestError):
    """A response could not be sent, because the client was gone, or `LLM.generate` was interrupted.

    Send the request again if its answer is still wanted.
    """

    tag = "TW-CANCELLED"
    code = "CANCELLED"


class EngineDead(RequestError):
    """The engine process ended or hung, or starts too slowly. The front end restarts it, unless it keeps dying.

    Send the request again after `retry_after_ms`. The engine's log says why it ended.
    """

    tag = "TW-ENGINE-DEAD"
    code = "UNAVAILABLE"
    retryable = True


class NumericError(RequestError):
    """The model's logits or outputs were not finite (NaN or infinite) for this request. No other is affected.

    Check the weights and `dtype`: float16 overflows in some models, bfloat16 and float32 do not.
    """

    tag = "TW-NUMERIC"


class ModelFailed(RequestError):
    """A one-shot model raised an error for this request. No other request is affected.

    Compare the inputs with what the model takes; the message has the model's words.
    """

    tag = "TW-MODEL"


class WrongKey(RequestError):
    """The gateway has API keys, and the request brings none or an unknown one. HTTP status 401.

    Send `Authorization: Bearer KEY` with a key of the gateway's file.
    """

    tag = "TW-KEY"
    code = "INVALID_ARG"


class InternalError(RequestError):
    """A bug of the server, or the device ran out of memory for one step.

    Do what the message says if it names a setting; otherwise report it with the server's log.
    """

    tag = "TW-INTERNAL"


class ServerUnavailable(RequestError):
    """The server is unreachable, or the connection was lost."""

    retryable = True


class RequestTimeout(RequestError):
    """The client's `timeout_s` passed."""


# Classes with a tag of their own.
BY_TAG: dict[str, type[RequestError]] = {
    cls.tag: cls for cls in list(globals().values()) if getattr(cls, "tag", "") and "tag" in vars(cls)
}

_TAGGED = re.compile(r"\[(?P<tag>TW-[A-Z-]+)(?: retry_after_ms=(?P<retry>\d+))?\] (?P<message>.*)\Z", re.DOTALL)
_BY_GRPC_STATUS: dict[str, type[RequestError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": NotFound,
    "UNIMPLEMENTED": Unsupported,
    "UNAVAILABLE": ServerUnavailable,
    "CANCELLED": Cancelled,
    "RESOURCE_EXHAUSTED": PromptTooLarge,
}
_BY_HTTP_STATUS: dict[int, type[RequestError]] = {
    **dict.fromkeys((401, 403), Unsupported),
    404: NotFound,
    413: PromptTooLarge,
    **dict.fromkeys((502, 503, 504), ServerUnavailable),
}
# Triton's messages without a status, or with INTERNAL.
_BY_TEXT: tuple[tuple[str, type[RequestError]], ...] = (
    ("has no available versions", ServerUnavailable),  # shutting down
    ("unknown model", NotFound),
    ("is not ready", NotFound),
    ("Exceeds maximum queue size", Busy),
    ("is not healthy", ServerUnavailable),
    ("unexpected inference input", InvalidRequest),
    ("missing required input", InvalidRequest),
)
_LOST = ("Stream removed", "Socket closed", "Connection reset", "Broken pipe", "GOAWAY")  # by gRPC
_LOST_AS_SENT = "Internal error from Core"  # by grpc.aio for an unwritten request
_RESTRICTED = "is restricted, expecting header"


def from_wire(tag: str, message: str, retry_after_ms: int | None = None) -> RequestError:
    """Return the error of a tag; `InternalError` for an unknown tag."""
    text = message if tag in BY_TAG else f"{tag}: {message}"
    return BY_TAG.get(tag, InternalError)(text, retry_after_ms=retry_after_ms)


def from_tagged(text: str) -> RequestError | None:
    """Return the error of a text that contains a tag, or None."""
    match = _TAGGED.search(text)
    if match is None:
        return None
    return from_wire(match["tag"], match["message"], int(match["retry"]) if match["retry"] else None)


def from_text(text: str) -> RequestError:
    return from_tagged(text) or _class_of_text(text)(text)


def from_rpc(error: "grpc.RpcError", url: str) -> RequestError:
    text, status = error.details() or "", error.code().name
    if _RESTRICTED in text:
        return Unsupported(
            f"{text}: ask the server's operator; tidewheel serve --open-api opens what serve itself closes"
        )
    if status == "DEADLINE_EXCEEDED":
        return RequestTimeout("the time limit of the request has passed")
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
