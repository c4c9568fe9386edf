"""Requests over sockets that a test reads, leaves unread or breaks off."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from support.triton.burst import GREEDY
from support.triton.serving import Server

LIMIT_S = 240.0
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing sends RST


class RawStream:
    """A `/generate_stream` request on a connection of its own."""

    def __init__(self, server: Server, prompt: str, max_tokens: int, **more: Any) -> None:
        fields = {**GREEDY, "text_input": prompt, "stream": True, "return_token_ids": True, "max_tokens": max_tokens}
        body = json.dumps({**fields, **more}).encode()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(LIMIT_S)
        self.socket.connect(("127.0.0.1", server.http_port))
        head = f"POST /v2/models/demo/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        self.socket.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
        self._received = b""

    def wait_for_first(self) -> None:
        while b"data:" not in self._received:
            self._receive()

    def finish(self) -> list[int]:
        """Return the tokens of all answers."""
        while self._receive():
            pass
        events = [line for line in self._received.split(b"\n") if line.startswith(b"data:")]
        answers = [json.loads(event.removeprefix(b"data:")) for event in events]
        assert not any("error" in answer for answer in answers), answers
        self.socket.close()
        return [token for answer in answers for token in _as_list(answer.get("token_ids", []))]

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.socket.close()

    def reset_after_first(self) -> None:
        self.wait_for_first()
        self.reset()

    def _receive(self) -> bool:
        data = self.socket.recv(1 << 16)
        self._received += data
        return bool(data)


def _as_list(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]


@contextmanager
def idle_connections(server: Server, count: int, heads: Sequence[bytes] = (b"",)) -> Iterator[list[socket.socket]]:
    """Open connections, each of which sends the begin of a request."""
    with ExitStack() as opened:
        sockets = []
        for index in range(count):
            sockets.append(opened.enter_context(socket.create_connection(("127.0.0.1", server.http_port))))
            sockets[-1].sendall(heads[index % len(heads)])
        yield sockets
