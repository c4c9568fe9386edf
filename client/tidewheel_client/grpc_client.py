"""Client with one gRPC call per request, so that no request can end another's stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tidewheel_client import codec
from tidewheel_client.answers import Completion, Metadata
from tidewheel_client.request_errors import InvalidRequest, RequestTimeout, ServerUnavailable, from_rpc
from tidewheel_client.stream import Stream

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # web proxies must not apply to the server
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # a server that is started again is back within seconds
)
# Makes Triton send errors as a gRPC status, not bare text, which ends the call.
_WITH_STATUS = ("triton_grpc_error", "true")
_PROBE_TIMEOUT_S = 5.0
_POLL_S = 0.1


class Client:
    """Thread-safe client of one model on one server. Every method raises `RequestError`.

    `timeout_s` bounds requests without their own. `credentials` turns on TLS. `headers` go with every call.
    """

    def __init__(
        self,
        url: str = "127.0.0.1:8001",
        model: str = "demo",
        *,
        timeout_s: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.url = url
        self.model = model
        self._timeout_s = timeout_s
        self._headers = tuple(headers)
        self._channel = (
            grpc.insecure_channel(url, options=_CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(url, credentials, options=_CHANNEL_OPTIONS)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[codec.Message] | str | None = None,
        input_ids: Sequence[int] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        **params: object,
    ) -> Stream:
        """Start a request with exactly one of `prompt`, `messages` and `input_ids`, and return its stream.

        A message is `{"role": …, "content": …}`. `params` are:

        - sampling keys: `max_tokens`, `temperature`, `stop`, …;
        - serving keys: `n`, `priority`, `tenant`, `deadline_ms`, `soft_deadline_ms`, `session_id`, `session_ttl_s`;
        - output flags: `return_token_ids`, `return_logprobs`, `return_cumulative_logprob`, `return_perf_metrics`.
        """
        request = self._encode(prompt, messages, input_ids, request_id, params, stream=True)
        return self._start(request, timeout_s)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[codec.Message] | str | None = None,
        input_ids: Sequence[int] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        **params: object,
    ) -> Completion:
        """Return the whole answer, with the arguments of `stream` except `n`."""
        if params.get("n", 1) != 1:
            raise InvalidRequest(f"n is {params['n']!r}: generate_all returns several sequences")
        request = self._encode(prompt, messages, input_ids, request_id, params, stream=False)
        with self._start(request, timeout_s) as stream:
            return stream.read()

    def generate_all(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[codec.Message] | str | None = None,
        input_ids: Sequence[int] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        **params: object,
    ) -> tuple[Completion, ...]:
        """Return one answer per sequence of `n`."""
        request = self._encode(prompt, messages, input_ids, request_id, params, stream=False)
        with self._start(request, timeout_s) as stream:
            return stream.read_all()

    def close_session(self, session_id: str, *, tenant: str = "", timeout_s: float | None = None) -> None:
        """Raise `NotFound` if the session is unknown."""
        params = {"close_session": True, "session_id": session_id, "tenant": tenant}
        request = self._encode("", None, None, "", params, stream=False)
        with self._start(request, timeout_s) as stream:
            stream.read()

    def is_ready(self) -> bool:
        try:
            return bool(self._unary("ModelReady", service_pb2.ModelReadyRequest(name=self.model)).ready)
        except ServerUnavailable:
            return False

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Raise `RequestTimeout` if time runs out."""
        end = time.monotonic() + timeout_s
        while not self.is_ready():
            if time.monotonic() >= end:
                raise RequestTimeout(f"model {self.model!r} at {self.url} is not ready after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def metadata(self) -> Metadata:
        server = self._unary("ServerMetadata", service_pb2.ServerMetadataRequest())
        model = self._unary("ModelMetadata", service_pb2.ModelMetadataRequest(name=self.model))
        return Metadata(
            server_version=server.version,
            model=model.name,
            versions=tuple(model.versions),
            platform=model.platform,
            inputs=tuple(tensor.name for tensor in model.inputs),
            outputs=tuple(tensor.name for tensor in model.outputs),
        )

    def streaming_models(self) -> tuple[str, ...]:
        """Return the ready models that stream, sorted."""
        index = self._unary("RepositoryIndex", service_pb2.RepositoryIndexRequest(ready=True))
        return tuple(sorted({entry.name for entry in index.models if self._is_decoupled(entry.name)}))

    def close(self) -> None:
        """Close the channel, cancelling running requests."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(
        self,
        prompt: str | None,
        messages: Sequence[codec.Message] | str | None,
        input_ids: Sequence[int] | None,
        request_id: str,
        params: dict[str, object],
        *,
        stream: bool,
    ) -> service_pb2.ModelInferRequest:
        source = codec.prompt_input(prompt, messages, input_ids)
        return codec.encode(self.model, request_id or uuid.uuid4().hex, source, params, stream=stream)

    def _start(self, request: service_pb2.ModelInferRequest, timeout_s: float | None) -> Stream:
        call = self._stub.ModelStreamInfer(
            iter((request,)),
            timeout=self._timeout_s if timeout_s is None else timeout_s,
            metadata=(*self._headers, _WITH_STATUS),
        )
        return Stream(call, request.id, self.url)

    def _is_decoupled(self, model: str) -> bool:
        config = self._unary("ModelConfig", service_pb2.ModelConfigRequest(name=model)).config
        return bool(config.model_transaction_policy.decoupled)

    def _unary(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=_PROBE_TIMEOUT_S, metadata=self._headers)
        except grpc.RpcError as error:
            raise from_rpc(error, self.url) from None
