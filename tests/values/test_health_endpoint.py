"""`/ready` and `/live` as a probe sees them, and as a peer that means ill."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import requests

from tidewheel.health_endpoint import MAX_CONNECTIONS, MAX_REQUEST_BYTES, READY, HealthEndpoint, Readiness

GIVEN_UP = Readiness("given up", "it died 5 times")
HUNG = Readiness("hung", "no step")
RANKS = {"demo": ["cuda:0", "cuda:1"]}


class Served:
    def __init__(self) -> None:
        self.now = READY
        self.endpoint = HealthEndpoint("127.0.0.1", 0, lambda: self.now, lambda: RANKS)

    def get(self, path: str) -> requests.Response:
        return requests.get(f"http://127.0.0.1:{self.endpoint.port}{path}", timeout=60)

    def send(self, request: bytes) -> bytes:
        with self.connect() as peer:
            peer.sendall(request)
            return b"".join(iter(lambda: peer.recv(4096), b""))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.endpoint.port), timeout=60)


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.endpoint.close()


@pytest.mark.parametrize(("now", "ready", "live"), [(READY, 200, 200), (HUNG, 503, 200), (GIVEN_UP, 503, 503)])
def test_the_states(served: Served, now: Readiness, ready: int, live: int) -> None:
    served.now = now
    answer = served.get("/ready?verbose=1")
    assert answer.status_code == ready
    assert answer.json() == {"ready": ready == 200, "state": now.state, "reason": now.reason, "ranks": RANKS}
    assert answer.headers["Content-Type"] == "application/json"
    assert served.get("/live").status_code == live
    text = served.get("/metrics")
    assert text.headers["Content-Type"].startswith("text/plain")
    samples = [line for line in text.text.splitlines() if not line.startswith("#")]
    assert samples == [f"tidewheel_ready {ready == 200:.1f}", f"tidewheel_live {live == 200:.1f}"]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /ready/ HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /ready HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"405"),
        (b"\r\n\r\n", b"400"),
        (b"\xff\xfe\x00\r\n\r\n", b"400"),
        (b"GET /" + b"a" * MAX_REQUEST_BYTES, b"400"),
        (b"GET /ready HTTP/1.0\n\n", b"200"),
    ],
)
def test_what_else_is_sent(served: Served, request_bytes: bytes, status: bytes) -> None:
    assert served.send(request_bytes).startswith(b"HTTP/1.1 " + status)


def test_a_head_has_no_body(served: Served) -> None:
    head, _, body = served.send(b"HEAD /ready HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b""


def test_idle_connections_keep_no_probe_out(served: Served) -> None:
    with contextlib.ExitStack() as held:
        idle = [held.enter_context(served.connect()) for _ in range(3 * MAX_CONNECTIONS)]
        assert served.get("/ready").status_code == 200
        assert idle[0].recv(1) == b""  # the oldest were ended


def test_a_taken_port_is_an_error(served: Served) -> None:
    with pytest.raises(OSError, match="in use"):
        HealthEndpoint("127.0.0.1", served.endpoint.port, lambda: READY)
