"""Parts of HTTP requests and answers that all endpoints share."""

from __future__ import annotations

import asyncio
import re
import uuid

from aiohttp import web

from tidewheel.gateway import bodies, openai_errors, passing
from tidewheel.gateway.bodies import Ask
from tidewheel.gateway.openai_errors import BodyTooLarge, MethodNotAllowed, UnknownUrl
from tidewheel_client.errors import InvalidRequest, RequestError, RequestTimeout, Unsupported

BODY_S = 60.0  # for a body to arrive
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


async def read_body(request: web.Request) -> bytes:
    if request.content_type != "application/json":
        raise Unsupported(f"Content-Type is {request.content_type}: send application/json")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Unsupported("Content-Encoding is set: send the body as it is")
    if (request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {BODY_S:g} s") from None


def id_of(request: web.Request, ask: Ask) -> str:
    given = ask.request_id or request.headers.get("X-Request-Id", "")
    if len(given) > bodies.MAX_REQUEST_ID_CHARS or not given.isprintable():
        raise InvalidRequest(f"X-Request-Id has more than {bodies.MAX_REQUEST_ID_CHARS} printable characters")
    return given or uuid.uuid4().hex


def traceparent(request: web.Request) -> str:
    """Return W3C's header. One that is malformed counts as absent, as its specification says."""
    header = request.headers.get("traceparent", "").strip()
    return header if _TRACEPARENT.fullmatch(header) else ""


def json_answer(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def refusal(request: web.Request, error: RequestError) -> web.Response:
    if request.path.startswith(passing.PATH):
        body = passing.error_body(error)
    else:
        body = openai_errors.body_of(error, request.get("fields", ()), request.get("schema_name", ""))
    return json_answer(body, status=openai_errors.status_of(error), headers=openai_errors.headers_of(error))


def of_http(request: web.Request, error: web.HTTPException) -> RequestError:
    """Return what aiohttp refuses by itself as an error of the gateway."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge(f"the body is larger than {request.client_max_size} bytes (--max-body-mb)")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowed(f"{request.method} {request.path}", error.allowed_methods)
    return UnknownUrl(f"{request.method} {request.path}: no such path")
