import functools
from collections.abc import Iterable, Iterator
from typing import Any, Literal, overload

from tidewheel_client import server_pages
from tidewheel_client.answers import Completion
from tidewheel_client.async_client import AsyncClient, AsyncSession, Item
from tidewheel_client.errors import RequestError
from tidewheel_client.facade import BlockingEvent, Facade, blocking, facing, in_threads, iterate, signed_as
from tidewheel_client.grpc_transport import GrpcTransport
from tidewheel_client.http_transport import HttpTransport
from tidewheel_client.stream import Stream


class _BlockingClient(AsyncClient):
    _event = BlockingEvent
    _grpc = GrpcTransport
    _http = HttpTransport
    _get_page = staticmethod(server_pages.blocking_get)
    _map = staticmethod(in_threads)


class Session(Facade[AsyncSession]):
    """Synchronous `AsyncSession`."""

    @property
    def session_id(self) -> str:
        return self._core.session_id

    stream = facing(AsyncSession.stream, Stream)
    generate = blocking(AsyncSession.generate)
    chat = blocking(AsyncSession.chat)
    pause = blocking(AsyncSession.pause)
    close = blocking(AsyncSession.close)


class Client(Facade[AsyncClient]):
    """Thread-safe, synchronous `AsyncClient`."""

    @signed_as(AsyncClient.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(_BlockingClient(*args, **options))

    @property
    def url(self) -> str:
        return self._core.url

    @property
    def model(self) -> str:
        return self._core.model

    @model.setter
    def model(self, model: str) -> None:
        self._core.model = model

    stream = facing(AsyncClient.stream, Stream)
    generate = blocking(AsyncClient.generate)
    generate_all = blocking(AsyncClient.generate_all)
    chat = blocking(AsyncClient.chat)
    embed = blocking(AsyncClient.embed)
    generate_image = blocking(AsyncClient.generate_image)
    close_session = blocking(AsyncClient.close_session)
    pause_session = blocking(AsyncClient.pause_session)
    load_lora = blocking(AsyncClient.load_lora)
    unload_lora = blocking(AsyncClient.unload_lora)
    list_loras = blocking(AsyncClient.list_loras)
    is_ready = blocking(AsyncClient.is_ready)
    wait_ready = blocking(AsyncClient.wait_ready)
    metadata = blocking(AsyncClient.metadata)
    streaming_models = blocking(AsyncClient.streaming_models)
    metrics = blocking(AsyncClient.metrics)
    health = blocking(AsyncClient.health)
    close = blocking(AsyncClient.close)
    session = facing(AsyncClient.session, Session)

    @overload
    def map(
        self, items: Iterable[Item], *, concurrency: int = ..., progress: bool = ...,
        return_errors: Literal[False] = ..., **params: Any,
    ) -> Iterator[Completion]: ...  # fmt: skip

    @overload
    def map(
        self, items: Iterable[Item], *, concurrency: int = ..., progress: bool = ..., return_errors: bool,
        **params: Any,
    ) -> Iterator[Completion | RequestError]: ...  # fmt: skip

    @functools.wraps(AsyncClient.map)
    def map(self, items: Iterable[Item], **options: Any) -> Iterator[Any]:
        return iterate(self._core.map(items, **options))
