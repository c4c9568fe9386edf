from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from tidewheel_client import codec
from tidewheel_client.answers import Chunk, Completion
from tidewheel_client.request_errors import Cancelled, InvalidRequest, ServerUnavailable, from_rpc, from_text


class Arrivals:
    """Reader of a request's responses, in the order of their arrival."""

    def __init__(self) -> None:
        self._finished: set[int] = set()  # sequences
        self.is_over = False  # every sequence has ended

    def take(self, response: service_pb2.ModelInferResponse) -> list[Chunk]:
        chunks = codec.decode(response)
        self.is_over = all(chunk.finish_reason is not None for chunk in chunks)
        return [chunk for chunk in chunks if len(chunks) == 1 or self._is_news(chunk)]

    def _is_news(self, chunk: Chunk) -> bool:
        """Return False for a sequence that has ended, which responses repeat."""
        if chunk.index in self._finished:
            return False
        if chunk.finish_reason is not None:
            self._finished.add(chunk.index)
            return True
        return bool(chunk.text or chunk.token_ids or chunk.num_output_tokens)


class Stream(Iterator[Chunk]):
    """Iterator over a request's chunks; raises `RequestError`.

    One thread reads; any may `cancel`, as does leaving the `with` block: the iteration ends, and the server drops the
    request. `finish_reason` is None until the end.
    """

    def __init__(self, call: Any, request_id: str, url: str) -> None:
        self._call = call  # iterator of ModelStreamInferResponse, with cancel()
        self._url = url
        self._cancelled = False
        self._ended = False
        self._arrivals = Arrivals()
        self._chunks: deque[Chunk] = deque()  # received, not yet returned
        self.request_id = request_id
        self.finish_reason: str | None = None

    def __next__(self) -> Chunk:
        while not self._chunks:
            if self._ended:
                self._close()
                raise StopIteration
            self._ended = True  # until a response shows that it goes on
            response = self._receive()
            if response is None:
                raise StopIteration
            self._chunks.extend(self._arrivals.take(response))
            self._ended = self._arrivals.is_over
        chunk = self._chunks.popleft()
        if self._ended and not self._chunks:
            self.finish_reason = chunk.finish_reason
        return chunk

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()

    def read(self) -> Completion:
        """Join the rest of the answer. Raise `Cancelled` after `cancel`, `InvalidRequest` for several sequences."""
        completions = self.read_all()
        if len(completions) > 1:
            raise InvalidRequest(f"the answer has {len(completions)} sequences: read them with read_all")
        return completions[0]

    def read_all(self) -> tuple[Completion, ...]:
        """Read all sequences, like `read`."""
        chunks = list(self)
        if not chunks or self.finish_reason is None:
            raise Cancelled("the stream was cancelled before its end")
        return Completion.of_sequences(self.request_id, chunks)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finish_reason is None:
            self.cancel()
        self._close()

    def _close(self) -> None:
        """Read the end of the call, which Triton would else see as cancelled late."""
        with contextlib.suppress(grpc.RpcError):
            while next(self._call, None) is not None:
                pass

    def _receive(self) -> Any | None:
        """Return None after `cancel`."""
        message = None
        try:
            message = next(self._call, None)
        except grpc.RpcError as error:
            if not self._cancelled:
                raise from_rpc(error, self._url) from None
        if self._cancelled:
            return None
        if message is None:
            raise ServerUnavailable("the stream ended before its last response")
        if message.error_message:
            self._close()  # server 2.51 can die if a stream is cancelled as its error is sent
            raise from_text(message.error_message)
        return message.infer_response
