"""The HTTP endpoints of a Triton without models, in this process, with answers that a test scripts."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Body = dict[str, Any]


class HttpError(Exception):
    """Error that an answer raises before its first event: status and text of the whole response."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def error_body(message: str) -> str:
    return json.dumps({"error": message})


def say_words(body: Body) -> Iterator[Body]:
    """Yield the words of the prompt, an event each."""
    words = body["text_input"].split()
    for index, word in enumerate(words):
        last = index == len(words) - 1
        yield {"text_output": word, "num_output_tokens": 1, "finish_reason": "stop" if last else "None"}


def one_answer(body: Body) -> Body:
    return {
        "outputs": [
            {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["an answer"]},
            {"name": "num_output_tokens", "datatype": "UINT32", "shape": [1], "data": [2]},
        ]
    }


@dataclass
class FakeHttpTriton:
    """A server as a context manager; `events` answers `/generate_stream`, `answer` answers `/infer`."""

    events: Callable[[Body], Iterator[Body]] = say_words
    answer: Callable[[Body], Body] = one_answer
    answer_page: str = ""  # in place of any answer
    asked: list[tuple[str, Body]] = field(default_factory=list)  # path and body of each request
    _server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a client that went away is part of a test."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _handler(fake: FakeHttpTriton) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.asked.append((self.path, body))
            try:
                if fake.answer_page:
                    self._whole(200, fake.answer_page)
                elif self.path.endswith("/generate_stream"):
                    self._stream(fake.events(body))
                else:
                    self._whole(200, json.dumps(fake.answer(body)))
            except HttpError as error:
                self._whole(error.status, error.text)

        def _stream(self, events: Iterator[Body]) -> None:
            first = next(events)  # an error before it decides the status
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._chunk(first)
            for event in events:
                self._chunk(event)
            self.wfile.write(b"0\r\n\r\n")

        def _chunk(self, event: Body) -> None:
            data = f"data: {json.dumps(event)}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def _whole(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    return Handler
