from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from tritonclient.grpc import service_pb2

from tidewheel_client.answers import Chunk
from tidewheel_client.errors import RequestError, Unsupported
from tidewheel_client.transport import Ask, Responses

Answer = str | Iterable[str | Chunk] | RequestError


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
