from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self, overload

import grpc
from tritonclient.grpc import service_pb2

from tidewheel_client import asking, codec
from tidewheel_client.answers import Completion, Metadata
from tidewheel_client.concurrent_map import in_threads
from tidewheel_client.errors import NotFound, RequestError, RequestTimeout, ServerUnavailable
from tidewheel_client.grpc_transport import GrpcTransport
from tidewheel_client.http_transport import HttpTransport
from tidewheel_client.retries import Retries
from tidewheel_client.server_pages import Figures, Health, ServerPages
from tidewheel_client.stream import Limits, Stream
from tidewheel_client.transport import Ask, Transport

_POLL_S = 0.1


class Client:
    """Thread-safe client of one model on one server. Methods raise `RequestError`.

    `url` is the address of Triton's gRPC service, `HOST:PORT`, or of its HTTP endpoints, `http://HOST:PORT` or https.
    `timeout_s` bounds requests without their own, retries included: `retries` says how often a request is sent again
    after a refusal that allows it. `credentials` turns on TLS of gRPC. `headers` go with every call. `transport`
    replaces the connection to `url`, for tests.
    """

    def __init__(
        self,
        url: str = "127.0.0.1:8001",
        model: str = "demo",
        *,
        timeout_s: float | None = None,
        retries: int = 0,
        credentials: grpc.ChannelCredentials | None = None,
        headers: Sequence[tuple[str, str]] = (),
        transport: Transport | None = None,
        metrics_url: str | None = None,
        health_url: str | None = None,
    ) -> None:
        self.url = url
        self.model = model
        self._timeout_s = timeout_s
        self._retries = Retries(retries)
        self._transport: Transport = transport or _connect(url, credentials, headers)
        self._pages = ServerPages(url, metrics_url, health_url)

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
        return self._start(
            asking.ask_of(self.model, prompt, messages, input_ids, request_id, params, stream=True), timeout_s
        )

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
        asking.check_one_sequence(params)
        ask = asking.ask_of(self.model, prompt, messages, input_ids, request_id, params)
        with self._start(ask, timeout_s) as stream:
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
        ask = asking.ask_of(self.model, prompt, messages, input_ids, request_id, params)
        with self._start(ask, timeout_s) as stream:
            return stream.read_all()

    def chat(self, messages: Sequence[codec.Message] | str, **arguments: Any) -> Completion:
        """Return the answer to messages, with the arguments of `generate`."""
        return self.generate(messages=messages, **arguments)

    def embed(
        self, prompt: str | None = None, *, input_ids: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> tuple[float, ...]:
        """Return the pooled hidden states of a prompt, of length 1."""
        ask = asking.ask_of(self.model, prompt, None, input_ids, "", {}, task="embed")
        with self._start(ask, timeout_s) as stream:
            return asking.embedding_of(list(stream))

    def session(self, session_id: str = "", *, ttl_s: float | None = None, tenant: str = "") -> Session:
        """Return a session, whose KV blocks wait for its next turn until it is closed or `ttl_s` have passed."""
        return Session(self, session_id or uuid.uuid4().hex, ttl_s, tenant)

    def close_session(self, session_id: str, *, tenant: str = "", timeout_s: float | None = None) -> None:
        """Raise `NotFound` if the session is unknown."""
        ask = asking.ask_of(self.model, "", None, None, "", asking.closing_params(session_id, tenant))
        with self._start(ask, timeout_s) as stream:
            stream.read()

    @overload
    def map(
        self, items: Iterable[asking.Item], *, concurrency: int = ..., progress: bool = ...,
        return_errors: Literal[False] = ..., **params: Any,
    ) -> Iterator[Completion]: ...  # fmt: skip

    @overload
    def map(
        self, items: Iterable[asking.Item], *, concurrency: int = ..., progress: bool = ..., return_errors: bool,
        **params: Any,
    ) -> Iterator[Completion | RequestError]: ...  # fmt: skip

    def map(
        self,
        items: Iterable[asking.Item],
        *,
        concurrency: int = 16,
        progress: bool = False,
        return_errors: bool = False,
        **params: Any,
    ) -> Iterator[Any]:
        """Generate for each prompt, list of messages, or dictionary of arguments of `generate`.

        Yield the answers in their order, of up to `concurrency` requests at a time, with a progress bar if wished. An
        error ends it, unless errors are to be returned in their places.
        """

        def ask(item: asking.Item) -> Completion | RequestError:
            try:
                return self.generate(**asking.arguments_of(item, params))
            except RequestError as error:
                if not return_errors:
                    raise
                return error

        return in_threads(ask, items, concurrency=concurrency, progress=progress)

    def is_ready(self) -> bool:
        try:
            answer = self._transport.call("ModelReady", service_pb2.ModelReadyRequest(name=self.model))
        except ServerUnavailable:
            return False
        return bool(answer.ready)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Raise `RequestTimeout` if time runs out."""
        end = time.monotonic() + timeout_s
        while not self.is_ready():
            if time.monotonic() >= end:
                raise RequestTimeout(f"model {self.model!r} at {self.url} is not ready after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def metadata(self) -> Metadata:
        call = self._transport.call
        server = call("ServerMetadata", service_pb2.ServerMetadataRequest())
        model = call("ModelMetadata", service_pb2.ModelMetadataRequest(name=self.model))
        return asking.metadata_of(server, model)

    def streaming_models(self) -> tuple[str, ...]:
        """Return the ready models that stream, sorted."""
        index = self._transport.call("RepositoryIndex", service_pb2.RepositoryIndexRequest(ready=True))
        names = {entry.name for entry in index.models}
        return tuple(sorted(name for name in names if self._is_decoupled(name)))

    def metrics(self) -> Figures:
        """Return the server's metrics, from `metrics_url`: by default port 8002 of the host."""
        return self._pages.metrics()

    def health(self) -> Health:
        """Return whether the server is ready, and why not, from `health_url`: by default port 8003 of the host."""
        return self._pages.health()

    def close(self) -> None:
        """Close the connection, cancelling running requests."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, ask: Ask, timeout_s: float | None) -> Stream:
        limits = Limits(self._timeout_s if timeout_s is None else timeout_s, self._retries)
        return Stream(self._transport, ask, limits)

    def _is_decoupled(self, model: str) -> bool:
        answer = self._transport.call("ModelConfig", service_pb2.ModelConfigRequest(name=model))
        return bool(answer.config.model_transaction_policy.decoupled)


class Session:
    """Turns of one conversation. Leaving the `with` block closes it; one that is gone by then is no error."""

    def __init__(self, client: Client, session_id: str, ttl_s: float | None, tenant: str) -> None:
        self.session_id = session_id
        self._client = client
        self._tenant = tenant
        self._params = asking.session_params(session_id, ttl_s, tenant)

    def stream(self, prompt: str | None = None, **arguments: Any) -> Stream:
        return self._client.stream(prompt, **self._params, **arguments)

    def generate(self, prompt: str | None = None, **arguments: Any) -> Completion:
        return self._client.generate(prompt, **self._params, **arguments)

    def chat(self, messages: Sequence[codec.Message] | str, **arguments: Any) -> Completion:
        return self._client.chat(messages, **self._params, **arguments)

    def close(self) -> None:
        """Raise `NotFound` if the session is unknown."""
        self._client.close_session(self.session_id, tenant=self._tenant)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(NotFound if error is None else RequestError):  # which must not hide the first
            self.close()


def _connect(url: str, credentials: grpc.ChannelCredentials | None, headers: Sequence[tuple[str, str]]) -> Transport:
    if asking.is_http(url, credentials):
        return HttpTransport(url, headers)
    return GrpcTransport(url, credentials, headers)
