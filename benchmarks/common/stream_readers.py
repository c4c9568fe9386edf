"""Clients of many requests that cost little, so that a machine's cores are the server's: sockets, frames, no library.

A reader process opens all streams and notes when each response came and how many tokens it held. A token of
`random_model` is one word ` t17`, so they are counted in the bytes of the response. A stream that ends begins again,
and so does a request that has its one answer.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

from tritonclient.grpc import service_pb2

PROMPT = "t5 t6 t7"
TOKEN = b" t"
MAX_STREAMS = 64  # of a gRPC connection
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_WINDOW = (1 << 31) - 1


class Asked(NamedTuple):
    address: str
    model: str
    max_tokens: int
    method: str = "ModelStreamInfer"  # of gRPC


class Received(NamedTuple):
    seconds: float  # of the window
    num_tokens: int
    gaps_ms: list[float]  # one for each response but a stream's first
    num_responses: int = 0


class Reader(Protocol):
    """Streams of one connection, by numbers of its own."""

    socket: socket.socket

    def read(self) -> Iterator[tuple[int, int]]:
        """Yield stream and tokens of each response that came."""


class HttpReader:
    """One `/generate_stream` request, `again` after its end."""

    def __init__(self, asked: Asked, *, again: bool = True) -> None:
        self._request = self._post(asked)
        self._again = again
        self._rest = b""
        self.num_ended = 0
        self.socket = connected(asked.address)
        if again:
            self.send()

    def send(self) -> None:
        self.socket.sendall(self._request)

    def _post(self, asked: Asked) -> bytes:
        fields = {"text_input": PROMPT, "stream": True, "ignore_eos": True, "max_tokens": asked.max_tokens}
        return http_post(f"/v2/models/{asked.model}/generate_stream", fields)

    def read(self) -> Iterator[tuple[int, int]]:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed a stream")
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if b'"error"' in event:
                raise RuntimeError(event.decode())
            yield 0, event.count(TOKEN)
        if data.endswith(b"0\r\n\r\n"):
            self.num_ended += 1
            if self._again:
                self.send()


class OpenAiReader(HttpReader):
    """One `/v1/completions` request that streams."""

    def _post(self, asked: Asked) -> bytes:
        fields = {"model": asked.model, "prompt": PROMPT, "stream": True}
        return http_post("/v1/completions", fields | {"ignore_eos": True, "max_tokens": asked.max_tokens})


class LineReader:
    """A stream of `bare_forwarder.py`: a line for each response."""

    def __init__(self, address: str) -> None:
        self.socket = connected(address)

    def read(self) -> Iterator[tuple[int, int]]:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the forwarder closed a stream")
        for line in data.splitlines():
            yield 0, line.count(TOKEN)


class InferReader:
    """`/infer` requests, one after the other."""

    def __init__(self, asked: Asked) -> None:
        given = {"text_input": PROMPT, "sampling_parameters": _sampling(asked)}
        inputs = [{"name": k, "datatype": "BYTES", "shape": [1], "data": [v]} for k, v in given.items()]
        self._request = http_post(f"/v2/models/{asked.model}/infer", {"inputs": inputs})
        self._rest = b""
        self.socket = connected(asked.address)
        self.socket.sendall(self._request)

    def read(self) -> Iterator[tuple[int, int]]:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed a connection")
        head, end_of_head, body = (self._rest + data).partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or b"0") if end_of_head else 0
        if not end_of_head or len(body) < size:
            self._rest += data
            return
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError((head + body).decode())
        self._rest = b""
        self.socket.sendall(self._request)
        yield 0, body.count(TOKEN)


class GrpcReader:
    """Calls of one request each, `again` after their end."""

    def __init__(self, asked: Asked, count: int, *, again: bool = True) -> None:
        self._call = _headers(asked)
        self._message = _grpc_message(asked)
        self._again = again
        self._next_id = 1
        self.num_ended = 0
        self._rest = b""
        self.socket = connected(asked.address)
        settings = struct.pack(">HI", 4, _WINDOW)  # initial window
        window = struct.pack(">I", _WINDOW - 65535)
        self.socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings) + _frame(8, 0, 0, window)
        )
        for _ in range(count):
            self.send()

    def send(self) -> None:
        number, self._next_id = self._next_id, self._next_id + 2
        call = _frame(_HEADERS, _END_HEADERS, number, self._call)
        self.socket.sendall(call + _frame(_DATA, _END_STREAM, number, self._message))

    def read(self) -> Iterator[tuple[int, int]]:
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed a connection")
        data, position = self._rest + data, 0
        while position + 9 <= len(data):
            size = int.from_bytes(data[position : position + 3], "big")
            if position + 9 + size > len(data):
                break
            kind, flags = data[position + 3], data[position + 4]
            stream = int.from_bytes(data[position + 5 : position + 9], "big")
            payload = data[position + 9 : position + 9 + size]
            position += 9 + size
            if kind == _DATA and size:
                yield stream, payload.count(TOKEN)
            else:
                self._answer(kind, flags, payload)
            if flags & _END_STREAM and kind in (_DATA, _HEADERS):
                self.num_ended += 1
                if self._again:
                    self.send()
        self._rest = data[position:]

    def _answer(self, kind: int, flags: int, payload: bytes) -> None:
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self.socket.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def http_post(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _headers(asked: Asked) -> bytes:
    """Return a header block of literals, which needs no table."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/inference.GRPCInferenceService/{asked.method}",
        ":authority": asked.address,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    texts = (text.encode() for field in fields.items() for text in (*field,))
    sized = [bytes([len(text)]) + text for text in texts]
    return b"".join(b"\0" + name + value for name, value in zip(sized[::2], sized[1::2], strict=True))


def request_of(asked: Asked) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=asked.model)
    inputs = [
        ("text_input", "BYTES", _bytes_tensor(PROMPT)),
        ("sampling_parameters", "BYTES", _bytes_tensor(_sampling(asked))),
    ]
    inputs += [("stream", "BOOL", b"\1")] if asked.method == "ModelStreamInfer" else []
    for name, kind, content in inputs:
        request.inputs.add(name=name, datatype=kind, shape=[1])
        request.raw_input_contents.append(content)
    return request


def _grpc_message(asked: Asked) -> bytes:
    body: bytes = request_of(asked).SerializeToString()
    return b"\0" + struct.pack(">I", len(body)) + body


def _sampling(asked: Asked) -> str:
    return json.dumps({"max_tokens": asked.max_tokens, "ignore_eos": True})


def _bytes_tensor(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode()


def read_streams(asked: Asked, transport: str, count: int, pipe: Connection) -> None:
    """Read until told to end. Say when all streams flow; answer "report" and "end" with what came since "begin"."""
    readers = _readers(asked, transport, count)
    by_descriptor = {reader.socket.fileno(): reader for reader in readers}
    poll = select.epoll()
    for descriptor in (*by_descriptor, pipe.fileno()):
        poll.register(descriptor, select.EPOLLIN)
    last: dict[tuple[int, int], float] = {}
    gaps: list[float] = []
    begin, num_tokens, num_responses, is_flowing = 0.0, 0, 0, False
    while True:
        ready = poll.poll()
        now = time.monotonic()
        for descriptor, _ in ready:
            if descriptor == pipe.fileno():
                if (command := pipe.recv()) != "begin":
                    pipe.send(Received(now - begin, num_tokens, gaps, num_responses))
                if command == "end":
                    return
                begin, num_tokens, num_responses, gaps = now, 0, 0, []
                continue
            for stream, count_tokens in by_descriptor[descriptor].read():
                num_tokens += count_tokens
                num_responses += 1
                if (before := last.get((descriptor, stream))) is not None:
                    gaps.append(1e3 * (now - before))
                last[descriptor, stream] = now
        if not is_flowing and len(last) >= count:
            is_flowing = True
            pipe.send("all flow")


def _readers(asked: Asked, transport: str, count: int) -> list[Reader]:
    """Make readers of grpc, http (`/generate_stream`), infer (`/infer`) or openai (`/v1/completions`)."""
    if transport == "grpc":
        return [GrpcReader(asked, min(MAX_STREAMS, count - first)) for first in range(0, count, MAX_STREAMS)]
    kind = {"http": HttpReader, "infer": InferReader, "openai": OpenAiReader}[transport]
    return [kind(asked) for _ in range(count)]
