import asyncio
import concurrent.futures
import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import httpx2
from google.protobuf.json_format import ParseDict, ParseError
from tritonclient.grpc import service_pb2

from tidewheel_client import codec, response_codec
from tidewheel_client.answers import Chunk
from tidewheel_client.errors import (
    Cancelled,
    InvalidRequest,
    RequestError,
    RequestTimeout,
    ServerUnavailable,
    from_http,
)
from tidewheel_client.server_pages import from_connection
from tidewheel_client.transport import CALL_TIMEOUT_S, END_S, Ask, Headers, is_cancelling

T = TypeVar("T")
_MAX_EVENT_BYTES = 64 << 20  # a long prompt's log-probabilities
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=64)


class AsyncHttpTransport:
    """Transport of one event loop over HTTP."""

    def __init__(self, url: str, headers: Headers = (), *, verify: ssl.SSLContext | bool = True) -> None:
        """`verify=False` accepts any certificate. Raise `InvalidRequest` for a bad URL."""
        self._url = url.rstrip("/")
        try:
            self._http = httpx2.AsyncClient(
                base_url=self._url,
                headers=list(headers),
                verify=verify,
                timeout=None,
                limits=_LIMITS,
                trust_env=False,  # no web proxy
            )
        except httpx2.InvalidURL as error:
            raise InvalidRequest(f"{url!r} is no address of a server: {error}") from None

    def open(self, ask: Ask, timeout_s: float | None) -> "AsyncHttpResponses":
        path, body = f"/v2/models/{ask.model}/generate_stream", json.dumps(codec.json_body(ask))
        request = self._http.build_request("POST", path, content=body.encode())
        return AsyncHttpResponses(self._http, request, self._url, timeout_s)

    async def call(self, method: str, request: Any) -> Any:
        """Send a message of Triton's gRPC service over HTTP."""
        verb, path, answer, field = _CALLS[method]
        content = b'{"ready": true}' if verb == "POST" else None
        try:
            response = await self._http.request(
                verb, path.format(getattr(request, "name", "")), content=content, timeout=CALL_TIMEOUT_S
            )
        except httpx2.TransportError as error:
            raise from_connection(error, self._url) from None
        if method == "ModelReady":
            return answer(ready=response.is_success)
        if not response.is_success:
            raise from_http(response.status_code, response.text)
        try:
            content = response.json()
            return ParseDict({field: content} if field else content, answer(), ignore_unknown_fields=True)
        except (ValueError, ParseError) as error:
            raise _foreign(self._url, error) from None

    async def close(self) -> None:
        await self._http.aclose()


class AsyncHttpResponses:
    def __init__(self, http: httpx2.AsyncClient, request: httpx2.Request, url: str, timeout_s: float | None) -> None:
        self._http = http
        self._request = request
        self._url = url
        self._end = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._events = self._read()
        self._is_cancelled = False
        self._next: asyncio.Future[Mapping[str, Any] | None] | None = self._ask_next()  # sends the request

    async def receive(self) -> list[Chunk] | None:
        if self._is_cancelled:
            return None
        self._next = self._next or self._ask_next()
        try:
            async with asyncio.timeout_at(self._end):
                event = await self._next
        except TimeoutError:
            raise RequestTimeout("the time limit of the request has passed") from None
        except asyncio.CancelledError:
            if not self._is_cancelled or is_cancelling():
                raise
            return None
        except (httpx2.SSEError, httpx2.DecodingError, ValueError) as error:
            raise _foreign(self._url, error) from None
        except httpx2.TransportError as error:
            raise from_connection(error, self._url) from None
        self._next = None
        if event is None or self._is_cancelled:
            return None
        outputs = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in event.items()}
        return response_codec.chunks_of(outputs)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._next is not None:
            self._next.cancel()

    async def close(self) -> None:
        """Read the answer to its end, which keeps the connection open, or close it."""
        with contextlib.suppress(RequestError, httpx2.HTTPError, TimeoutError):
            if not self._is_cancelled:
                async with asyncio.timeout(END_S):
                    await (self._next or self._ask_next())
        with contextlib.suppress(httpx2.HTTPError):
            await self._events.aclose()  # type: ignore[attr-defined]

    def _ask_next(self) -> asyncio.Future[Mapping[str, Any] | None]:
        found = asyncio.ensure_future(anext(self._events, None))
        found.add_done_callback(lambda done: done.cancelled() or done.exception())  # also without a reader
        return found

    async def _read(self) -> AsyncIterator[Mapping[str, Any]]:
        response = await self._http.send(self._request, stream=True)
        try:
            if not response.is_success:
                raise from_http(response.status_code, (await response.aread()).decode(errors="replace"))
            async for event in httpx2.EventSource(response, _MAX_EVENT_BYTES):
                values = json.loads(event.data)
                if "error" in values:
                    raise from_http(response.status_code, str(values["error"]))
                yield values
        finally:
            await response.aclose()


class HttpTransport:
    """Thread-safe HTTP transport, whose event loop runs in a thread."""

    def __init__(self, url: str, headers: Headers = (), *, verify: ssl.SSLContext | bool = True) -> None:
        self._transport = AsyncHttpTransport(url, headers, verify=verify)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tidewheel-http", daemon=True)
        self._thread.start()

    def open(self, ask: Ask, timeout_s: float | None) -> "HttpResponses":
        async def send() -> AsyncHttpResponses:
            return self._transport.open(ask, timeout_s)

        return HttpResponses(self._loop, _result(self._loop, send()))

    async def call(self, method: str, request: Any) -> Any:
        return _result(self._loop, self._transport.call(method, request))

    async def close(self) -> None:
        if self._loop.is_closed():
            return
        _result(self._loop, self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await self._transport.close()


class HttpResponses:
    def __init__(self, loop: asyncio.AbstractEventLoop, responses: AsyncHttpResponses) -> None:
        self._loop = loop
        self._responses = responses

    async def receive(self) -> list[Chunk] | None:
        return _result(self._loop, self._responses.receive())

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._responses.cancel)

    async def close(self) -> None:
        _result(self._loop, self._responses.close())


def _result(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    except concurrent.futures.CancelledError:
        raise Cancelled("the client was closed") from None


# Verb, path, answer, and its only field, whose name Triton's JSON omits.
_CALLS: dict[str, tuple[str, str, Any, str]] = {
    "ModelReady": ("GET", "/v2/models/{}/ready", service_pb2.ModelReadyResponse, ""),
    "ServerMetadata": ("GET", "/v2", service_pb2.ServerMetadataResponse, ""),
    "ModelMetadata": ("GET", "/v2/models/{}", service_pb2.ModelMetadataResponse, ""),
    "ModelConfig": ("GET", "/v2/models/{}/config", service_pb2.ModelConfigResponse, "config"),
    "RepositoryIndex": ("POST", "/v2/repository/index", service_pb2.RepositoryIndexResponse, "models"),
}


def _foreign(url: str, error: Exception) -> ServerUnavailable:
    return ServerUnavailable(f"{url} does not answer as Triton does: {error}")
