"""HTTP that no client library sends. Triton answers it, and must live."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator

import pytest
import requests

from faults.conftest import Case
from support.triton.serving import Server

pytestmark = pytest.mark.e2e

BODY = b'{"text_input": "The server", "max_tokens": 4}'
LIMIT_S = 180.0


def infer(**changes: object) -> bytes:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["The server"]}
    return json.dumps({"inputs": [{**tensor, **changes}]}).encode()


TWICE = {"name": "text_output"}
# (path, headers, body)
MALFORMED: dict[str, tuple[str, dict[str, str], bytes]] = {
    "truncated": ("demo/generate", {}, b"{"),
    "nested": ("demo/generate", {}, b"[" * 200),
    "number for text": ("demo/generate", {}, b'{"text_input": 5}'),
    "two texts": ("demo/generate", {}, b'{"text_input": ["a", "b"]}'),
    "header length": ("demo_infer/infer", {"Inference-Header-Content-Length": "99999999999"}, infer()),
    "negative header length": ("demo_infer/infer", {"Inference-Header-Content-Length": "-1"}, infer()),
    "shape that overflows": ("demo_infer/infer", {}, infer(shape=[2**4, 2**60 + 2])),
    "wrong type": ("demo_infer/infer", {}, infer(datatype="FP32")),
    "unknown tensor": ("demo_infer/infer", {}, infer(name="nobody")),
    "no data": ("demo_infer/infer", {}, infer(data=[])),
    "rank": ("demo_infer/infer", {}, infer(shape=[1, 1])),
    "no such model": ("nobody/infer", {}, infer()),
    "not gzip": ("demo/generate", {"Content-Encoding": "gzip"}, BODY),
}


def assert_alive(server: Server) -> None:
    assert requests.get(f"{server.http}/v2/health/live", timeout=LIMIT_S).status_code == 200


def test_malformed_requests(server: Server, case: Case) -> None:
    with case():
        for name, (path, headers, body) in MALFORMED.items():
            answer = server.post(path, body, headers=headers)
            assert 400 <= answer.status_code <= 500, (name, answer.status_code)
            assert answer.json()["error"], name
            assert_alive(server)
        twice = server.post("demo_infer/infer", {**json.loads(infer()), "outputs": [TWICE, TWICE]})
        assert twice.status_code in (200, 400)
        assert_alive(server)


@pytest.mark.slow
def test_bodies_that_are_too_big(server: Server, case: Case) -> None:
    """Triton takes 64 MiB. A compressed one is larger when it is unpacked."""
    with case(spare_bytes=512 << 20):
        plain = json.dumps({"text_input": "x" * (64 << 20)}).encode()
        assert server.post("demo/generate", plain).status_code >= 400
        bomb = gzip.compress(json.dumps({"text_input": "x" * (256 << 20)}).encode())
        assert server.post("demo/generate", bomb, headers={"Content-Encoding": "gzip"}).status_code >= 400
        assert_alive(server)


def chunks(body: bytes) -> Iterator[bytes]:
    for byte in body:
        yield b"%x\r\n%c\r\n" % (1, byte)
    yield b"0\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize("num_chunks", [1_000, 65_537])
def test_many_chunks(server: Server, case: Case, num_chunks: int) -> None:
    head = b"POST /v2/models/demo/generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with case(), socket.create_connection(("127.0.0.1", server.http_port)) as connection:
        connection.settimeout(LIMIT_S)
        connection.sendall(head + b"".join(chunks(BODY + b" " * num_chunks)))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 ")
        assert_alive(server)
