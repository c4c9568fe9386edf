import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, overload

import grpc
import msgspec
from tritonclient.grpc import service_pb2

from tidewheel_client import codec, errors, server_pages
from tidewheel_client.answers import Completion, Health, LoraState, Metadata, Picture
from tidewheel_client.errors import InvalidRequest, RequestError
from tidewheel_client.facade import AsyncEvent, WakeEvent, in_tasks, signed_as
from tidewheel_client.grpc_transport import AsyncGrpcTransport
from tidewheel_client.http_transport import AsyncHttpTransport
from tidewheel_client.server_pages import Figures, ServerPages
from tidewheel_client.stream import AsyncStream
from tidewheel_client.transport import Ask, Headers, Transport

Item = str | Sequence[codec.Message] | Mapping[str, Any]  # as `map` says
_POLL_S = 0.1
_NUM_PREVIEWS = 10


class AsyncClient(contextlib.AbstractAsyncContextManager["AsyncClient"]):
    """Client of one model on one server, for one event loop. Methods raise `RequestError`.

    `url` is `HOST:PORT` of Triton's gRPC service, or the `http://` or `https://` URL of its HTTP endpoints.
    `timeout_s` is the default limit of a request with its retries; `retries` limits those after `retryable` errors.
    `credentials` turns on gRPC's TLS, `headers` go with every call, and tests set `transport`.
    """

    # A synchronous client's core differs in these.
    _event: ClassVar[type[WakeEvent]] = AsyncEvent
    _grpc: ClassVar[Callable[..., Transport]] = AsyncGrpcTransport
    _http: ClassVar[Callable[..., Transport]] = AsyncHttpTransport
    _get_page: ClassVar[Any] = staticmethod(server_pages.async_get)
    _map: ClassVar[Callable[..., AsyncIterator[Any]]] = staticmethod(in_tasks)

    def __init__(
        self,
        url: str = "127.0.0.1:8001",
        model: str = "demo",
        *,
        timeout_s: float | None = None,
        retries: int = 0,
        credentials: grpc.ChannelCredentials | None = None,
        headers: Headers = (),
        transport: Transport | None = None,
        metrics_url: str | None = None,
        health_url: str | None = None,
    ) -> None:
        self.url = url
        self.model = model
        self._timeout_s = timeout_s
        self._retries = retries
        self._transport = transport or self._connect(credentials, headers)
        self._pages = ServerPages(url, metrics_url, health_url, self._get_page)

    def stream(
        self,
        /,
        prompt: str | None = None,
        *,
        messages: Sequence[codec.Message] | str | None = None,
        input_ids: Sequence[int] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        **params: object,
    ) -> AsyncStream:
        """Start a request with exactly one of `prompt`, `messages` and `input_ids`.

        A message is `{"role": …, "content": …}`. `params` are:

        - sampling keys: `max_tokens`, `temperature`, `stop`, …;
        - serving keys: `n`, `priority`, `tenant`, `deadline_ms`, `soft_deadline_ms`, `ttft_ms`, `tpot_ms`,
          `objective_action`, `session_id`, `session_ttl_s`, `lora_name`;
        - output flags: `return_token_ids`, `return_logprobs`, `return_cumulative_logprob`, `return_perf_metrics`.
        """
        given = codec.prompt_input(prompt, messages, input_ids)
        return self._start(given, params, timeout_s, request_id, stream=True)

    @signed_as(stream)
    async def generate(self, /, *prompt: str, **arguments: Any) -> Completion:
        """Return the whole answer of one sequence. Takes the arguments of `stream` except `n`."""
        if arguments.get("n", 1) != 1:
            raise InvalidRequest(f"n is {arguments['n']!r}: generate_all returns several sequences")
        async with self._start_whole(*prompt, **arguments) as stream:
            return await stream.read()

    @signed_as(stream)
    async def generate_all(self, /, *prompt: str, **arguments: Any) -> tuple[Completion, ...]:
        """Return one answer for each of the `n` sequences. Takes the arguments of `stream`."""
        async with self._start_whole(*prompt, **arguments) as stream:
            return await stream.read_all()

    async def chat(self, /, messages: Sequence[codec.Message] | str, **arguments: Any) -> Completion:
        """Return the answer to a conversation. Takes the arguments of `generate`."""
        return await self.generate(messages=messages, **arguments)

    async def embed(
        self, /, prompt: str | None = None, *, input_ids: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> tuple[float, ...]:
        """Return the prompt's embedding: its pooled hidden states, scaled to length 1."""
        given = codec.prompt_input(prompt, None, input_ids) | {"task": "embed"}
        async with self._start(given, {}, timeout_s) as stream:
            chunks = [chunk async for chunk in stream]
        if not chunks or chunks[-1].embedding is None:
            raise errors.InternalError("the answer has no embedding")
        return chunks[-1].embedding

    async def generate_image(
        self,
        /,
        prompt: str | None = None,
        *,
        label: int | None = None,
        on_progress: Callable[[Picture], object] | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        **params: object,
    ) -> Picture:
        """Return the picture of a prompt, of a label, or of neither, as the model takes them.

        `on_progress` gets previews, by default up to 10 (`partial_images`, or `preview_every`), and the picture. An
        exception from it cancels the request. Other `params` are `steps`, `size`, `seed`, `guidance_scale`,
        `on_deadline`, `format` (`raw` or `png_base64`), `priority`, `tenant`, `deadline_ms`, `soft_deadline_ms`.
        """
        if (image_format := params.get("format", "raw")) not in ("raw", "png_base64"):
            raise InvalidRequest(f"format is {image_format!r}: it must be raw or png_base64")
        if on_progress is not None:
            params = {"partial_images": _NUM_PREVIEWS, **params}
        inputs, picture = {"prompt": prompt, "label": None if label is None else [label]}, None
        given = {name: value for name, value in inputs.items() if value is not None}
        async with self._start(given, params, timeout_s, request_id, as_parameters=True) as stream:
            async for chunk in stream:
                picture = chunk.picture
                if on_progress is not None and picture is not None:
                    on_progress(picture)
        if picture is None:
            raise errors.InternalError("the answer has no picture")
        return picture

    def session(self, session_id: str = "", *, ttl_s: float | None = None, tenant: str = "") -> "AsyncSession":
        """Return a conversation whose KV blocks the server keeps between turns, for `ttl_s`."""
        return AsyncSession(self, session_id or uuid.uuid4().hex, ttl_s, tenant)

    async def close_session(self, /, session_id: str, *, tenant: str = "", timeout_s: float | None = None) -> None:
        """End a session and free its KV blocks. Raise `NotFound` if the server has no such session."""
        await self._order({"close_session": True, "session_id": session_id, "tenant": tenant}, timeout_s)

    async def pause_session(
        self, /, session_id: str, tools: Sequence[str], *, tenant: str = "", timeout_s: float | None = None
    ) -> None:
        """Say which tools the session's last answer called, so that its KV blocks stay about as long as these run."""
        await self._order({"pause_session": list(tools), "session_id": session_id, "tenant": tenant}, timeout_s)

    async def load_lora(self, /, name: str, path: str, *, timeout_s: float | None = None) -> None:
        """Load a LoRA adapter, or a new version of it, from a folder below the entry's `lora_dir`."""
        await self._order({"lora_order": "load", "lora_name": name, "lora_path": path}, timeout_s)

    async def unload_lora(self, /, name: str, *, timeout_s: float | None = None) -> None:
        """Forget a LoRA adapter. Raise `NotFound` if the model has no such adapter."""
        await self._order({"lora_order": "unload", "lora_name": name}, timeout_s)

    async def list_loras(self, /, *, timeout_s: float | None = None) -> list[LoraState]:
        """Return the LoRA adapters that requests may name as `lora_name`."""
        text = await self._order({"lora_order": "list"}, timeout_s)
        try:
            return msgspec.json.decode(text, type=list[LoraState])
        except ValueError as error:
            raise errors.InternalError(f"the server's list of adapters cannot be read: {error}") from None

    @overload
    def map(
        self, items: Iterable[Item], *, concurrency: int = ..., progress: bool = ...,
        return_errors: Literal[False] = ..., **params: Any,
    ) -> AsyncIterator[Completion]: ...  # fmt: skip

    @overload
    def map(
        self, items: Iterable[Item], *, concurrency: int = ..., progress: bool = ..., return_errors: bool,
        **params: Any,
    ) -> AsyncIterator[Completion | RequestError]: ...  # fmt: skip

    def map(
        self,
        items: Iterable[Item],
        *,
        concurrency: int = 16,
        progress: bool = False,
        return_errors: bool = False,
        **params: Any,
    ) -> AsyncIterator[Any]:
        """Yield the answers to `items` in their order: prompts, lists of messages, or arguments of `generate`.

        Up to `concurrency` requests run at a time. An error ends the iteration, or with `return_errors` is yielded.
        Raise `ValueError` for a `concurrency` below 1.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}: it must be at least 1")

        async def ask(item: Item) -> Completion | RequestError:
            try:
                return await self.generate(**_arguments(item, params))
            except RequestError as error:
                if not return_errors:
                    raise
                return error

        return self._map(ask, items, concurrency=concurrency, progress=progress)

    async def is_ready(self, /) -> bool:
        try:
            answer = await self._transport.call("ModelReady", service_pb2.ModelReadyRequest(name=self.model))
        except errors.ServerUnavailable:
            return False
        return bool(answer.ready)

    async def wait_ready(self, /, timeout_s: float = 60.0) -> None:
        """Wait until server and model are ready. Raise `RequestTimeout`."""
        end = time.monotonic() + timeout_s
        while not await self.is_ready():
            if time.monotonic() >= end:
                raise errors.RequestTimeout(f"model {self.model!r} at {self.url} is not ready after {timeout_s:g} s")
            await self._event().wait_for(_POLL_S)

    async def metadata(self, /) -> Metadata:
        server = await self._transport.call("ServerMetadata", service_pb2.ServerMetadataRequest())
        model = await self._transport.call("ModelMetadata", service_pb2.ModelMetadataRequest(name=self.model))
        return Metadata(
            server_version=server.version,
            model=model.name,
            versions=tuple(model.versions),
            platform=model.platform,
            inputs=tuple(tensor.name for tensor in model.inputs),
            outputs=tuple(tensor.name for tensor in model.outputs),
        )

    async def streaming_models(self, /) -> tuple[str, ...]:
        index = await self._transport.call("RepositoryIndex", service_pb2.RepositoryIndexRequest(ready=True))
        asked = [service_pb2.ModelConfigRequest(name=name) for name in {entry.name for entry in index.models}]
        configs = [(await self._transport.call("ModelConfig", one)).config for one in asked]
        return tuple(sorted(one.name for one in configs if one.model_transaction_policy.decoupled))

    async def metrics(self, /) -> Figures:
        """Return the server's metrics from `metrics_url` (default: port 8002 of the host)."""
        return await self._pages.metrics()

    async def health(self, /) -> Health:
        """Return the server's readiness from `health_url` (default: port 8003 of the host)."""
        return await self._pages.health()

    async def close(self, /) -> None:
        """Close the connection, cancelling running requests."""
        await self._transport.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _connect(self, credentials: grpc.ChannelCredentials | None, headers: Headers) -> Transport:
        if not self.url.startswith(("http://", "https://")):
            return self._grpc(self.url, credentials, headers)
        if credentials is not None:
            raise InvalidRequest(
                f"credentials are for gRPC, and {self.url} is HTTP: https in place of http turns on TLS"
            )
        return self._http(self.url, headers)

    async def _order(self, params: Mapping[str, object], timeout_s: float | None) -> str:
        async with self._start({"text_input": ""}, params, timeout_s) as stream:
            return (await stream.read()).text

    def _start_whole(self, prompt: str | None = None, **arguments: Any) -> AsyncStream:
        names = ("messages", "input_ids", "timeout_s", "request_id")
        messages, input_ids, timeout_s, request_id = (arguments.pop(name, None) for name in names)
        return self._start(codec.prompt_input(prompt, messages, input_ids), arguments, timeout_s, request_id or "")

    def _start(
        self,
        prompt: Mapping[str, object],
        params: Mapping[str, object],
        timeout_s: float | None,
        request_id: str = "",
        **kind: bool,
    ) -> AsyncStream:
        ask = Ask(model=self.model, request_id=request_id or uuid.uuid4().hex, prompt=prompt, params=params, **kind)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return AsyncStream(self._transport, ask, limit_s, self._retries, self._event())


class AsyncSession(contextlib.AbstractAsyncContextManager["AsyncSession"]):
    """Conversation, whose requests share a session; leaving the `with` block closes the session."""

    def __init__(self, client: AsyncClient, session_id: str, ttl_s: float | None, tenant: str) -> None:
        self.session_id = session_id
        self._client = client
        self._tenant = tenant
        params = {"session_id": session_id, "session_ttl_s": ttl_s, "tenant": tenant or None}
        self._params: dict[str, Any] = {name: value for name, value in params.items() if value is not None}

    def stream(self, /, prompt: str | None = None, **arguments: Any) -> AsyncStream:
        return self._client.stream(prompt, **self._params, **arguments)

    async def generate(self, /, prompt: str | None = None, **arguments: Any) -> Completion:
        return await self._client.generate(prompt, **self._params, **arguments)

    async def chat(self, /, messages: Sequence[codec.Message] | str, **arguments: Any) -> Completion:
        return await self._client.chat(messages, **self._params, **arguments)

    async def pause(self, /, tools: Sequence[str]) -> None:
        """Say which tools the last answer called."""
        await self._client.pause_session(self.session_id, tools, tenant=self._tenant)

    async def close(self, /) -> None:
        """End the session. Raise `NotFound` if the server has no such session."""
        await self._client.close_session(self.session_id, tenant=self._tenant)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with contextlib.suppress(errors.NotFound if error is None else RequestError):  # must not hide the first
            await self.close()


def _arguments(item: Item, params: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(item, str):
        return {"prompt": item, **params}
    return {**params, **item} if isinstance(item, Mapping) else {"messages": item, **params}
