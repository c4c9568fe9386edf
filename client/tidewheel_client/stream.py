from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from tidewheel_client.answers import Chunk, Completion
from tidewheel_client.errors import Cancelled, InvalidRequest, RequestError, ServerUnavailable
from tidewheel_client.retries import Retries
from tidewheel_client.transport import Ask, AsyncTransport, Transport


class Arrivals:
    """A request's news, in the order of their arrival."""

    def __init__(self) -> None:
        self._finished: set[int] = set()  # sequences
        self._chunks: deque[Chunk] = deque()  # arrived, not yet taken
        self.has_begun = False
        self.is_over = False  # every sequence has ended
        self.finish_reason: str | None = None  # of the chunk that was taken last, at the end

    def take(self, response: list[Chunk]) -> list[Chunk]:
        """Return what is new in a response."""
        self.has_begun = True
        self.is_over = all(chunk.finish_reason is not None for chunk in response)
        return [chunk for chunk in response if self._is_news(chunk)]

    def add(self, response: list[Chunk]) -> Chunk | None:
        """Note a response, and return its first news."""
        if len(response) == 1:  # most, at a third of the cost
            chunk = response[0]
            self.has_begun, self.finish_reason = True, chunk.finish_reason
            self.is_over = chunk.finish_reason is not None
            return chunk
        self._chunks.extend(self.take(response))
        return self.next()

    def next(self) -> Chunk | None:
        """Return the next chunk, if one has arrived."""
        if not self._chunks:
            return None
        chunk = self._chunks.popleft()
        if self.is_over and not self._chunks:
            self.finish_reason = chunk.finish_reason
        return chunk

    def _is_news(self, chunk: Chunk) -> bool:
        """Return False for a sequence that has ended, which responses repeat."""
        if chunk.index in self._finished:
            return False
        if chunk.finish_reason is not None:
            self._finished.add(chunk.index)
            return True
        return bool(chunk.text or chunk.token_ids or chunk.num_output_tokens)


class Limits(NamedTuple):
    timeout_s: float | None = None  # of a request with its retries
    retries: Retries = Retries()


class _Tries:
    """Time and tries of one request."""

    def __init__(self, limits: Limits) -> None:
        self._end = None if limits.timeout_s is None else time.monotonic() + limits.timeout_s
        self._retries = limits.retries
        self._num_retries = 0

    def left_s(self) -> float | None:
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def wait_s(self, error: RequestError, arrivals: Arrivals) -> float | None:
        """Return how long to wait for the next try, or None."""
        wait = None if arrivals.has_begun else self._retries.wait_s(error, self._num_retries, self.left_s())
        self._num_retries += 1
        return wait


def _broken() -> ServerUnavailable:
    return ServerUnavailable("the stream ended before its last response")


def _completions(request_id: str, chunks: Sequence[Chunk], finish_reason: str | None) -> tuple[Completion, ...]:
    if not chunks or finish_reason is None:
        raise Cancelled("the stream was cancelled before its end")
    return Completion.of_sequences(request_id, chunks)


def _only(completions: Sequence[Completion]) -> Completion:
    if len(completions) > 1:
        raise InvalidRequest(f"the answer has {len(completions)} sequences: read them with read_all")
    return completions[0]


class Stream(Iterator[Chunk]):
    """Iterator over a request's chunks; raises `RequestError`.

    One thread reads; any may `cancel`, as does leaving the `with` block: the iteration ends, and the server drops the
    request. `finish_reason` is None until the end.
    """

    def __init__(self, transport: Transport, ask: Ask, limits: Limits) -> None:
        self._transport = transport
        self._ask = ask
        self._tries = _Tries(limits)
        self._arrivals = Arrivals()
        self._cancelled = threading.Event()
        self._has_ended = False  # without its last response
        self._responses = transport.open(ask, self._tries.left_s())
        self.request_id = ask.request_id

    @property
    def finish_reason(self) -> str | None:
        return self._arrivals.finish_reason

    def __next__(self) -> Chunk:
        chunk = self._arrivals.next()
        while chunk is None:
            if self._arrivals.is_over or self._has_ended:
                self._responses.close()
                raise StopIteration
            try:
                response = self._responses.receive()
            except RequestError as error:
                self._try_again(error)
                continue
            if response is not None:
                chunk = self._arrivals.add(response)
            elif self._cancelled.is_set():
                self._has_ended = True
            else:
                self._try_again(_broken())
        return chunk

    def cancel(self) -> None:
        self._cancelled.set()
        self._responses.cancel()

    def read(self) -> Completion:
        """Join the rest of the answer. Raise `Cancelled` after `cancel`, `InvalidRequest` for several sequences."""
        return _only(self.read_all())

    def read_all(self) -> tuple[Completion, ...]:
        """Read all sequences, like `read`."""
        chunks = list(self)
        return _completions(self.request_id, chunks, self.finish_reason)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finish_reason is None:
            self.cancel()
        self._responses.close()

    def _try_again(self, error: RequestError) -> None:
        """Wait, and send the request once more; raise the error if it must not be."""
        wait_s = self._tries.wait_s(error, self._arrivals)
        self._has_ended = wait_s is None
        if wait_s is None:
            raise error
        self._has_ended = self._cancelled.wait(wait_s)
        if self._has_ended:
            return
        self._responses = self._transport.open(self._ask, self._tries.left_s())
        if self._cancelled.is_set():
            self._responses.cancel()


class AsyncStream(AsyncIterator[Chunk]):
    """`Stream` of a task, with `async for` and `async with`."""

    def __init__(self, transport: AsyncTransport, ask: Ask, limits: Limits) -> None:
        self._transport = transport
        self._ask = ask
        self._tries = _Tries(limits)
        self._arrivals = Arrivals()
        self._is_cancelled = False
        self._has_ended = False  # without its last response
        self._responses = transport.open(ask, self._tries.left_s())
        self.request_id = ask.request_id

    @property
    def finish_reason(self) -> str | None:
        return self._arrivals.finish_reason

    async def __anext__(self) -> Chunk:
        chunk = self._arrivals.next()
        while chunk is None:
            if self._arrivals.is_over or self._has_ended:
                await self._responses.close()
                raise StopAsyncIteration
            try:
                response = await self._responses.receive()
            except RequestError as error:
                await self._try_again(error)
                continue
            if response is not None:
                chunk = self._arrivals.add(response)
            elif self._is_cancelled:
                self._has_ended = True
            else:
                await self._try_again(_broken())
        return chunk

    def cancel(self) -> None:
        self._is_cancelled = True
        self._responses.cancel()

    async def read(self) -> Completion:
        """Join the rest of the answer. Raise `Cancelled` after `cancel`, `InvalidRequest` for several sequences."""
        return _only(await self.read_all())

    async def read_all(self) -> tuple[Completion, ...]:
        """Read all sequences, like `read`."""
        chunks = [chunk async for chunk in self]
        return _completions(self.request_id, chunks, self.finish_reason)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finish_reason is None:
            self.cancel()
        await self._responses.close()

    async def _try_again(self, error: RequestError) -> None:
        """Wait, and send the request once more; raise the error if it must not be."""
        wait_s = self._tries.wait_s(error, self._arrivals)
        self._has_ended = wait_s is None
        if wait_s is None:
            raise error
        await asyncio.sleep(wait_s)
        self._has_ended = self._is_cancelled
        if not self._is_cancelled:
            self._responses = self._transport.open(self._ask, self._tries.left_s())
