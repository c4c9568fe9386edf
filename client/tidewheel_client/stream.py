import random
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager

from tidewheel_client.answers import Chunk, Completion
from tidewheel_client.errors import Cancelled, InvalidRequest, RequestError, ServerUnavailable
from tidewheel_client.facade import Facade, WakeEvent, blocking
from tidewheel_client.transport import Ask, Transport

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0


class Arrivals:
    def __init__(self) -> None:
        self._finished: set[int] = set()
        self._chunks: deque[Chunk] = deque()
        self.has_begun = False
        self.is_over = False
        self.finish_reason: str | None = None

    def take(self, response: list[Chunk]) -> list[Chunk]:
        """Return chunks of sequences that had not ended before."""
        self.has_begun = True
        self.is_over = all(chunk.finish_reason is not None for chunk in response)
        return [chunk for chunk in response if self._is_new(chunk)]

    def add(self, response: list[Chunk]) -> Chunk | None:
        """Queue a response's new chunks, and return the first queued."""
        if len(response) == 1:  # most, at a third of the cost
            chunk = response[0]
            self.has_begun, self.finish_reason = True, chunk.finish_reason
            self.is_over = chunk.finish_reason is not None
            return chunk
        self._chunks.extend(self.take(response))
        return self.next()

    def next(self) -> Chunk | None:
        if not self._chunks:
            return None
        chunk = self._chunks.popleft()
        if self.is_over and not self._chunks:
            self.finish_reason = chunk.finish_reason
        return chunk

    def _is_new(self, chunk: Chunk) -> bool:
        if chunk.index in self._finished:
            return False
        if chunk.finish_reason is not None:
            self._finished.add(chunk.index)
            return True
        return bool(chunk.text or chunk.token_ids or chunk.num_output_tokens or chunk.picture)


def retry_wait_s(error: RequestError, num_retries: int, left_s: float | None) -> float | None:
    """Return the wait before a retry; None: final error, or `left_s` too short. A random part spreads retries."""
    if not error.retryable:
        return None
    backoff = min(_FIRST_WAIT_S * 2**num_retries, _LONGEST_WAIT_S)
    wait = backoff if error.retry_after_ms is None else max(error.retry_after_ms / 1e3, 0.0)
    wait *= 1 + random.random() / 4  # noqa: S311
    return None if left_s is not None and wait >= left_s else wait


class AsyncStream(AsyncIterator[Chunk], AbstractAsyncContextManager["AsyncStream"]):
    """Iterator over a request's chunks; raises `RequestError`. One task or thread reads; any may `cancel`.

    `cancel`, or leaving the `with` block, ends iteration and request. `finish_reason` is None until the end.
    `timeout_s` includes retries.
    """

    def __init__(
        self, transport: Transport, ask: Ask, timeout_s: float | None, retries: int, cancelled: WakeEvent
    ) -> None:
        self._transport = transport
        self._ask = ask
        self._retries = retries  # at most, before any chunk
        self._num_retries = 0
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._arrivals = Arrivals()
        self._cancelled = cancelled
        self._has_ended = False  # without its last response
        self._responses = transport.open(ask, timeout_s)
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
                await self._retry(error)
                continue
            if response is not None:
                chunk = self._arrivals.add(response)
            elif self._cancelled.is_set():
                self._has_ended = True
            else:
                await self._retry(ServerUnavailable("the stream ended before its last response"))
        return chunk

    def cancel(self) -> None:
        self._cancelled.set()
        self._responses.cancel()

    async def read(self) -> Completion:
        """Return the rest of the answer. Raise `Cancelled` after `cancel`, `InvalidRequest` for several sequences."""
        completions = await self.read_all()
        if len(completions) > 1:
            raise InvalidRequest(f"the answer has {len(completions)} sequences: read them with read_all")
        return completions[0]

    async def read_all(self) -> tuple[Completion, ...]:
        """Return the rest of all sequences."""
        chunks = [chunk async for chunk in self]
        if not chunks or self.finish_reason is None:
            raise Cancelled("the stream was cancelled before its end")
        return Completion.of_sequences(self.request_id, chunks)

    async def __aexit__(self, *_: object) -> None:
        if self.finish_reason is None:
            self.cancel()
        await self._responses.close()

    async def _retry(self, error: RequestError) -> None:
        may_retry = not self._arrivals.has_begun and self._num_retries < self._retries
        wait_s = retry_wait_s(error, self._num_retries, self._left_s()) if may_retry else None
        self._num_retries += 1
        self._has_ended = wait_s is None
        if wait_s is None:
            raise error
        self._has_ended = await self._cancelled.wait_for(wait_s)
        if not self._has_ended:
            self._responses = self._transport.open(self._ask, self._left_s())
            if self._cancelled.is_set():
                self._responses.cancel()

    def _left_s(self) -> float | None:
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)


class Stream(Facade[AsyncStream], Iterator[Chunk]):
    """Synchronous `AsyncStream`."""

    @property
    def request_id(self) -> str:
        return self._core.request_id

    @property
    def finish_reason(self) -> str | None:
        return self._core.finish_reason

    def __next__(self) -> Chunk:
        try:
            self._core.__anext__().send(None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except StopAsyncIteration:
            raise StopIteration from None
        raise AssertionError("unreachable: a transport of a synchronous client never suspends")

    def cancel(self) -> None:
        self._core.cancel()

    read = blocking(AsyncStream.read)
    read_all = blocking(AsyncStream.read_all)
