"""Attempts of another user of the machine, who reads argument lists and reaches the ports, at APIs that are closed.

Requests are written to the socket byte by byte: no client library sends such names of headers.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from support.triton.serving import ROOT, Server

NOBODY = 65534
LIMIT_S = 20.0
GRPC_PREFIX = b"triton-grpc-protocol-"
FLAGS = (b"--http-restricted-api=", b"--grpc-restricted-protocol=")
_DATA, _HEADERS, _RESET, _SETTINGS, _GOAWAY, _CONTINUATION = 0, 1, 3, 4, 7, 9
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_LITERALS = {"plain": 0x00, "indexed": 0x40, "never indexed": 0x10}  # HPACK's for a new name


class Key(NamedTuple):
    """Header that opens an API, as tritonserver's arguments say."""

    name: bytes
    value: bytes


class Call(NamedTuple):
    """An HTTP request or, with a method's name for the path, a call of gRPC."""

    path: str
    body: bytes
    verb: str = "POST"


def attack(server: Server, api: str, http: Sequence[Call], grpc: Sequence[Call]) -> dict[str, list[str]]:
    """Return for each path the ways of sending the API's key with which the server did as it was asked.

    They are tried by another user if this process is root's. The key is the one that tritonserver's arguments show.
    """
    order = [server.triton_process().pid, api, [(server.http_port, *_plain(http)), (server.grpc_port, *_plain(grpc))]]
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(order),
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    told: dict[str, list[str]] = json.loads(done.stdout)
    return told


def _plain(calls: Sequence[Call]) -> list[tuple[str, str, str]]:
    return [(call.path, call.body.hex(), call.verb) for call in calls]


def _attack() -> None:
    """Try what standard input says, as another user, and print what was done."""
    pid, api, orders = json.load(sys.stdin)
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    told = {}
    for flag, breaches, (port, *calls) in zip(FLAGS, (http_breaches, grpc_breaches), orders, strict=True):
        key = read_key(pid, flag, api)
        told |= {path: breaches(port, Call(path, bytes.fromhex(body), verb), key) for path, body, verb in calls}
    print(json.dumps(told))


def read_key(pid: int, flag: bytes, api: str) -> Key:
    """Return the key of an API from the arguments of a tritonserver, which every user may read."""
    for argument in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
        apis, _, pair = argument.removeprefix(flag).partition(b":")
        if argument.startswith(flag) and api.encode() in apis.split(b","):
            return Key(*pair.split(b"=", 1))
    raise LookupError(f"{api} is not restricted by {flag!r}")


def http_breaches(port: int, call: Call, key: Key) -> list[str]:
    return [way for way, request in _http_requests(call, key) if _http_status(port, request) // 100 == 2]


def grpc_breaches(port: int, call: Call, key: Key) -> list[str]:
    return [way for way, headers, after in _grpc_headers(key) if _grpc_answers(port, call, headers, after)]


def _names(name: bytes) -> Iterator[tuple[str, bytes]]:
    head, _, tail = name.partition(b":")
    text = name.decode()
    yield "as it is", name
    yield "small", name.lower()
    yield "capital", name.upper()
    yield "percent-encoded", quote(text).encode()
    yield "without spaces", name.replace(b" ", b"")
    yield "dashes", name.replace(b" ", b"-").replace(b":", b"-").lower()
    yield "quoted", b'"' + name + b'"'
    yield "escaped", name.replace(b":", b"\\:")
    yield "wide colon", text.replace(":", "\N{FULLWIDTH COLON}").encode()
    yield "overlong colon", name.replace(b":", b"\xc0\xba")
    yield "zero byte", name.replace(b":", b"\0:")
    yield "tab", name.replace(b":", b"\t:")
    yield "before the colon", head
    yield "after the colon", tail


def _http_requests(call: Call, key: Key) -> Iterator[tuple[str, bytes]]:
    yield "no key", _request(call)
    for way, name in _names(key.name):
        yield way, _request(call, name + b": " + key.value)
    head, _, tail = key.name.partition(b":")
    yield "split at the colon", _request(call, head + b":" + tail + b"=" + key.value)
    yield "folded", _request(call, head + b"\r\n :" + tail + b": " + key.value)
    yield "return in the name", _request(call, head + b"\r:" + tail + b": " + key.value)
    yield "no colon", _request(call, key.name.replace(b":", b"") + b": " + key.value)
    query = f"?{quote(key.name.decode())}={quote(key.value.decode())}"
    yield "query", _request(call._replace(path=call.path + query))
    chunk = b"%x\r\n%s\r\n0\r\n%s: %s\r\n\r\n" % (len(call.body), call.body, key.name, key.value)
    yield "trailer", _request(call._replace(body=b""), b"Transfer-Encoding: chunked").replace(
        b"Content-Length: 0\r\n", b""
    ) + chunk  # fmt: skip


def _request(call: Call, *lines: bytes) -> bytes:
    """Write what a web page of any origin may send without asking first: a simple POST of text."""
    head = [
        f"{call.verb} {call.path} HTTP/1.1\r\nHost: x\r\nConnection: close".encode(),
        b"Content-Length: %d" % len(call.body),
        b"Origin: http://attacker.example\r\nContent-Type: text/plain",
        *lines,
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + call.body


def _http_status(port: int, request: bytes) -> int:
    """Return the status, or 0 where the connection ends without one."""
    answer = b""
    with _connected(port) as connection:
        try:
            connection.sendall(request)
            while b"\r\n" not in answer and (data := connection.recv(1 << 16)):
                answer += data
        except ConnectionError:
            pass
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0


def _connected(port: int) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(LIMIT_S)
    connection.connect(("127.0.0.1", port))
    return connection


def _grpc_headers(key: Key) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield a way, its headers, and those that follow the message."""
    yield "no key", b"", b""
    for literal, first in _LITERALS.items():
        for way, name in _names(key.name):
            yield f"{way}, {literal}", _field(GRPC_PREFIX + name, key.value, first), b""
        yield f"binary, {literal}", _field(GRPC_PREFIX + key.name + b"-bin", key.value, first), b""
    yield "without the prefix", _field(key.name, key.value), b""
    yield "pseudo-header", _field(b":" + GRPC_PREFIX + key.name, key.value), b""
    yield "twice", 2 * _field(GRPC_PREFIX + key.name, key.value), b""
    # The second field takes its name from the table that the first one has filled.
    yield "from the table", _field(GRPC_PREFIX + key.name, b"x", 0x40) + b"\x7e" + _text(key.value), b""
    yield "trailer", b"", _field(GRPC_PREFIX + key.name, key.value)


def _grpc_answers(port: int, call: Call, headers: bytes, after: bytes) -> bool:
    """Return whether a call is answered by a message: a refusal has none."""
    start = (":method", "POST"), (":scheme", "http"), (":path", f"/inference.GRPCInferenceService/{call.path}")
    start += (":authority", "x"), ("content-type", "application/grpc"), ("te", "trailers")
    block = b"".join(_field(name.encode(), value.encode()) for name, value in start) + headers
    message = b"\0" + struct.pack(">I", len(call.body)) + call.body
    out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, 0, 1, block[:9])
    out += _frame(_CONTINUATION, _END_HEADERS, 1, block[9:]) + _frame(_DATA, 0 if after else _END_STREAM, 1, message)
    out += _frame(_HEADERS, _END_HEADERS | _END_STREAM, 1, after) if after else b""
    with _connected(port) as connection, connection.makefile("rb") as answer:
        try:
            connection.sendall(out)
            while len(head := answer.read(9)) == 9:
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
                answer.read(int.from_bytes(head[:3], "big"))
                if kind == _DATA and stream == 1:
                    return True
                if kind in (_RESET, _GOAWAY) or (kind == _HEADERS and flags & _END_STREAM):
                    return False
                if kind == _SETTINGS and not flags & _ACK:
                    connection.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        except ConnectionError:
            pass
    return False


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _field(name: bytes, value: bytes, first: int = 0x00) -> bytes:
    return bytes([first]) + _text(name) + _text(value)


def _text(text: bytes) -> bytes:
    """Encode as HPACK does without Huffman's code."""
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, length = len(text) - 127, bytearray([127])
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes([*length, rest]) + text


if __name__ == "__main__":
    _attack()
