"""Interface between a client and its connection to a server, and a transport for tests of clients.

A synchronous client's transport blocks and never suspends.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tritonclient.grpc import service_pb2

from tidewheel_client.answers import Chunk
from tidewheel_client.errors import RequestError, Unsupported

CALL_TIMEOUT_S = 5.0
END_S = 1.0  # of a request, after its last response
Headers = Sequence[tuple[str, str]]
Answer = str | Iterable[str | Chunk] | RequestError  # of a mock


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    model: str
    request_id: str
    prompt: Mapping[str, object]  # from `codec`, perhaps with a `task`
    params: Mapping[str, object] = field(default_factory=dict)  # sampling and serving keys, flags
    stream: bool = False
    as_parameters: bool = False  # send `params` as the request's parameters, not in tensors


class Responses(Protocol):
    """Responses to one request. One task or thread reads; any may cancel."""

    def receive(self) -> Awaitable[list[Chunk] | None]:
        """Return a chunk per sequence; None after the end or a cancel. Raise `RequestError`."""

    def cancel(self) -> None: ...

    async def close(self) -> None:
        """Read a finished request's responses to the end."""


class Transport(Protocol):
    def open(self, ask: Ask, timeout_s: float | None) -> Responses:
        """Send a request. Raise `RequestError`."""

    async def call(self, method: str, request: Any) -> Any:
        """Return Triton's answer to a gRPC message. Raise `RequestError`."""

    async def close(self) -> None: ...


def is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class MockTransport:
    """Transport without a server, for tests of clients (docs/clients.md), that answers with the result of `answer`.

    The result is a text, parts (texts or chunks of one sequence), or a returned or raised error. The last part's
    finish reason is `stop` by default.
    """

    def __init__(self, answer: Callable[[Ask], Answer]) -> None:
        self.asked: list[Ask] = []
        self._answer = answer

    def open(self, ask: Ask, timeout_s: float | None) -> Responses:  # noqa: ARG002
        self.asked.append(ask)
        return _MockResponses(lambda: self._answer(ask))

    async def call(self, method: str, request: Any) -> Any:  # noqa: ARG002
        """Answer `ModelReady`. Raise `Unsupported` for others."""
        if method != "ModelReady":
            raise Unsupported(f"a mock transport does not answer {method}")
        return service_pb2.ModelReadyResponse(ready=True)

    async def close(self) -> None:
        pass


class _MockResponses:
    def __init__(self, answer: Callable[[], Answer]) -> None:
        self._chunks = _chunks(answer)

    async def receive(self) -> list[Chunk] | None:
        chunk = next(self._chunks, None)
        return None if chunk is None else [chunk]

    def cancel(self) -> None:
        self._chunks = iter(())

    async def close(self) -> None:
        pass


def _chunks(answer: Callable[[], Answer]) -> Iterator[Chunk]:
    given = answer()
    if isinstance(given, RequestError):
        raise given
    parts = [given] if isinstance(given, str) else list(given)
    for index, part in enumerate(parts, start=1):
        chunk = part if isinstance(part, Chunk) else Chunk(text=part)
        is_open = index == len(parts) and chunk.finish_reason is None
        yield replace(chunk, finish_reason="stop") if is_open else chunk
