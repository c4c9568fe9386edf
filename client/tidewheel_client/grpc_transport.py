"""Transports over Triton's gRPC service. Each request has its own call: its end leaves other streams alone."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, ClassVar

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tidewheel_client import codec, response_codec
from tidewheel_client.answers import Chunk
from tidewheel_client.errors import ServerUnavailable, from_rpc, from_text
from tidewheel_client.facade import settled
from tidewheel_client.transport import CALL_TIMEOUT_S, END_S, Ask, Headers, is_cancelling

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # to find a restarted server
)
# Triton ends the call with a gRPC status in place of bare text.
WITH_STATUS = ("triton_grpc_error", "true")
CLOSED = "the connection was closed before the answer came"  # by this program
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


class GrpcResponses:
    """Responses of a blocking call."""

    _end_limit: ClassVar[Any] = contextlib.nullcontext

    def __init__(self, call: Any, url: str) -> None:
        self._call = call
        self._url = url
        self._is_cancelled = False

    async def receive(self) -> list[Chunk] | None:
        message, failure = None, ""
        try:
            message = await self._next()
            if message is not None and (failure := message.error_message):
                await self.close()  # server 2.51 can die if a stream is cancelled as its error is sent
        except asyncio.CancelledError:
            if is_cancelling():
                raise
            if not self._is_cancelled:
                raise ServerUnavailable(CLOSED) from None
        except grpc.RpcError as error:
            if not self._is_cancelled:
                raise from_rpc(error, self._url) from None
        if self._is_cancelled or message is None:
            return None
        if failure:
            raise from_text(failure)
        return response_codec.decode(message.infer_response)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._call.cancel()

    async def close(self) -> None:
        """Read the call to its end; else Triton records a cancel of a finished request."""
        with contextlib.suppress(grpc.RpcError, TimeoutError):
            async with self._end_limit():
                while not self._is_cancelled and await self._next() is not None:
                    pass

    async def _next(self) -> Any:
        """Return the next message; None after the end."""
        return next(self._call, None)


class AsyncGrpcResponses(GrpcResponses):
    _end_limit = staticmethod(lambda: asyncio.timeout(END_S))

    def __init__(self, call: Any, url: str) -> None:
        super().__init__(call, url)
        self._messages = aiter(call)

    def _next(self) -> Awaitable[Any]:  # type: ignore[override]
        return anext(self._messages, None)


class GrpcTransport:
    """Thread-safe transport, whose coroutines block instead of suspending."""

    _library: ClassVar[Any] = grpc
    _responses: ClassVar[type[GrpcResponses]] = GrpcResponses

    def __init__(self, url: str, credentials: grpc.ChannelCredentials | None = None, headers: Headers = ()) -> None:
        self._url = url
        self._headers = tuple(headers)
        self._channel = (
            self._library.insecure_channel(url, options=CHANNEL_OPTIONS)
            if credentials is None
            else self._library.secure_channel(url, credentials, options=CHANNEL_OPTIONS)
        )
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # Not Triton's `stream_stream`: the message and its end go out together.
        self._stream = self._channel.unary_stream(
            STREAM_METHOD,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=response_codec.StreamResponse.FromString,
        )

    def open(self, ask: Ask, timeout_s: float | None = None) -> GrpcResponses:
        return self.send(codec.encode(ask), timeout_s)

    def send(self, request: service_pb2.ModelInferRequest, timeout_s: float | None = None) -> GrpcResponses:
        call = self._stream(request, timeout=timeout_s, metadata=(*self._headers, WITH_STATUS))
        return self._responses(call, self._url)

    async def call(self, method: str, request: Any, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        try:
            call = getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._headers)
            return await settled(call)
        except asyncio.CancelledError:
            if is_cancelling():
                raise
            raise ServerUnavailable(CLOSED) from None
        except grpc.RpcError as error:
            raise from_rpc(error, self._url) from None

    async def close(self) -> None:
        await settled(self._channel.close())


class AsyncGrpcTransport(GrpcTransport):
    """Transport of one event loop."""

    _library = grpc.aio
    _responses = AsyncGrpcResponses
