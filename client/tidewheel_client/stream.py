"""One answer as it arrives."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc

from tidewheel_client import codec
from tidewheel_client.errors import Cancelled, InvalidRequest, ServerUnavailable, from_rpc, from_text
from tidewheel_client.values import Chunk, Completion


class Stream(Iterator[Chunk]):
    """Iterates over the chunks of one request; ends after the last `finish_reason`, or raises `RequestError`.

    With `n` over 1 each chunk is of one sequence, named by its `index`. One thread reads; any thread may `cancel`,
    which ends the iteration and makes the server drop the request. Leaving the `with` block cancels what is not
    finished. `finish_reason` is None until the end.
    """

    def __init__(self, call: Any, request_id: str, url: str) -> None:
        self._call = call  # the gRPC call: an iterator of ModelStreamInferResponse, with cancel()
        self._url = url
        self._cancelled = False
        self._ended = False
        self._chunks: deque[Chunk] = deque()  # of responses, not handed out yet
        self._finished: set[int] = set()  # sequences
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
            chunks = codec.decode(response)
            self._ended = all(chunk.finish_reason is not None for chunk in chunks)
            self._chunks.extend(chunk for chunk in chunks if len(chunks) == 1 or self._is_news(chunk))
        chunk = self._chunks.popleft()
        if self._ended and not self._chunks:
            self.finish_reason = chunk.finish_reason
        return chunk

    def cancel(self) -> None:
        """Idempotent, and harmless after the end."""
        self._cancelled = True
        self._call.cancel()

    def read(self) -> Completion:
        """Waits for the end; what is left of the answer, as one. Raises `Cancelled` if `cancel` was called before,
        and `InvalidRequest` if there are several sequences."""
        completions = self.read_all()
        if len(completions) > 1:
            raise InvalidRequest(f"the answer has {len(completions)} sequences: read them with read_all")
        return completions[0]

    def read_all(self) -> tuple[Completion, ...]:
        """As `read`, one for each sequence."""
        chunks = list(self)
        if not chunks or self.finish_reason is None:
            raise Cancelled("the stream was cancelled before its end")
        by_index: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            by_index.setdefault(chunk.index, []).append(chunk)
        return tuple(Completion.from_chunks(self.request_id, by_index[index]) for index in sorted(by_index))

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finish_reason is None:
            self.cancel()
        self._close()

    def _is_news(self, chunk: Chunk) -> bool:
        """Each response of several sequences has an element for all of them, also for those that have ended."""
        if chunk.index in self._finished:
            return False
        if chunk.finish_reason is not None:
            self._finished.add(chunk.index)
            return True
        return bool(chunk.text or chunk.token_ids or chunk.num_output_tokens)

    def _close(self) -> None:
        """Takes the server's end of the call: a call that is dropped before would reach Triton as a late cancel."""
        with contextlib.suppress(grpc.RpcError):
            while next(self._call, None) is not None:
                pass

    def _receive(self) -> Any | None:
        """The next ModelInferResponse; None after `cancel`."""
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
            raise from_text(message.error_message)
        return message.infer_response
