"""HTTP status, headers and body of each `RequestError`, as OpenAI's clients expect them."""

import math
from collections.abc import Collection, Container
from typing import NamedTuple

import msgspec
from aiohttp import web

from tidewheel_client import errors

_RETRY_AFTER_MS = 1000  # if the server names no time


class FieldMissing(errors.InvalidRequest):
    """Missing field of a body; the message begins with its name."""


class BodyTooLarge(errors.RequestError):
    pass


class MethodNotAllowed(errors.RequestError):
    def __init__(self, request: str, allowed: Collection[str]) -> None:
        self.allowed = sorted(allowed)
        super().__init__(f"{request}: use {' or '.join(self.allowed)}")


class PermissionDenied(errors.RequestError):
    """The API key lacks a right."""


class UnknownUrl(errors.NotFound):
    pass


class PreviousResponseMissing(errors.InvalidRequest):
    pass


class Meaning(NamedTuple):
    status: int
    type: str
    code: str


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_MEANINGS: dict[type[errors.RequestError], Meaning] = {
    errors.InvalidRequest: Meaning(400, _INVALID, "invalid_value"),
    errors.PromptTooLarge: Meaning(400, _INVALID, "context_length_exceeded"),
    errors.Unsupported: Meaning(400, _INVALID, "unsupported_parameter"),
    errors.WrongKey: Meaning(401, "authentication_error", "invalid_api_key"),
    PermissionDenied: Meaning(403, _INVALID, "permission_denied"),
    errors.NotFound: Meaning(404, _INVALID, "model_not_found"),
    UnknownUrl: Meaning(404, _INVALID, "unknown_url"),
    PreviousResponseMissing: Meaning(400, _INVALID, "previous_response_not_found"),
    MethodNotAllowed: Meaning(405, _INVALID, "method_not_allowed"),
    BodyTooLarge: Meaning(413, _INVALID, "body_too_large"),
    errors.Busy: Meaning(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Cancelled: Meaning(499, _INVALID, "cancelled"),
    errors.Draining: Meaning(503, _SERVER, "service_unavailable"),
    errors.EngineDead: Meaning(503, _SERVER, "service_unavailable"),
    errors.ServerUnavailable: Meaning(503, _SERVER, "service_unavailable"),
    errors.DeadlineExceeded: Meaning(504, _SERVER, "deadline_exceeded"),
    errors.RequestTimeout: Meaning(504, _SERVER, "timeout"),
}
# The client's names by the backend's.
_NAMES = {
    "text_input": ("prompt", "input"),
    "input_ids": ("prompt", "tokens", "input"),
    "audio_file": ("file",),
    "qos_class": ("priority",),
    "logprobs": ("top_logprobs",),
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    "messages": ("messages", "input"),
    "stop": ("stop", "stop_sequences"),
}
_ANTHROPIC_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_ANTHROPIC_TYPES |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
_BUG = Meaning(500, _SERVER, "internal_error")


def meaning_of(error: errors.RequestError) -> Meaning:
    return next((_MEANINGS[cls] for cls in type(error).__mro__ if cls in _MEANINGS), _BUG)


def headers_of(error: errors.RequestError) -> dict[str, str]:
    headers = {"x-should-retry": str(error.retryable).lower()}
    if error.retryable:
        retry_ms = error.retry_after_ms or _RETRY_AFTER_MS
        headers |= {"Retry-After": str(math.ceil(retry_ms / 1000)), "retry-after-ms": str(retry_ms)}
    if isinstance(error, errors.WrongKey):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    return headers


def openai_body(error: errors.RequestError, fields: Container[str] = ()) -> bytes:
    """Return the error as JSON. `param` is the first word of the message, if it is one of `fields`."""
    meaning = meaning_of(error)
    first = error.message.split(" ", 1)[0].rstrip(":")
    named = next((name for name in _NAMES.get(first, ()) if name in fields), first)
    name = named.split(":", 1)[0]
    is_known = isinstance(error, FieldMissing) or name.split(".", 1)[0].split("[", 1)[0] in fields
    message = named + error.message.removeprefix(first)
    body = {"message": message, "type": meaning.type, "param": name if is_known else None, "code": meaning.code}
    return msgspec.json.encode({"error": body | ({"tag": error.tag} if error.tag else {})})


def anthropic_body(error: bytes, status: int) -> bytes:
    """Return an error of `openai_body` in Anthropic's form."""
    given = msgspec.json.decode(error)["error"]
    kind = _ANTHROPIC_TYPES.get(status, _INVALID if status < 500 else "api_error")
    body = {"type": kind} | {key: given[key] for key in ("message", "tag") if key in given}
    return msgspec.json.encode({"type": "error", "error": body})


def from_aiohttp(request: web.Request, error: web.HTTPException) -> errors.RequestError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge(f"the body is larger than {request.client_max_size} bytes (--max-body-mb)")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowed(f"{request.method} {request.path}", error.allowed_methods)
    return UnknownUrl(f"{request.method} {request.path}: no such path")
