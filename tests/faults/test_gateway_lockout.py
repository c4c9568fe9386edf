"""Clients without a key that hold connections of a gateway with few open files. Honest clients are answered."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from faults.conftest import Case
from support.triton.serving import Server, free_ports, wait_for

pytestmark = pytest.mark.e2e

NUM_DESCRIPTORS = 128
NUM_HELD = 200
ROUNDS = 3
LIMIT_S = 60.0
HALF_HEADER = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "
HALF_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"
)
ATTACKS = {
    "silent": b"",
    "half headers": HALF_HEADER,
    "half bodies": HALF_BODY,
    "idle": b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
}


@contextlib.contextmanager
def gateway(server: Server, folder: Path, num_workers: int) -> Iterator[tuple[str, Path]]:
    """Start one with few open files; yield its URL and its log."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tidewheel.cli.main", "gateway", f"--port={port}", f"--workers={num_workers}"]
    limited = ["/bin/sh", "-c", f'ulimit -n {NUM_DESCRIPTORS} && exec "$@"', "sh", *command]
    url, log = f"http://127.0.0.1:{port}", folder / "gateway.log"
    environment = os.environ | {"TIDEWHEEL_RUN_DIR": str(folder)}
    with log.open("wb") as stream, subprocess.Popen(
        [*limited, f"--url=127.0.0.1:{server.grpc_port}"], env=environment, stdout=stream, stderr=stream
    ) as process:  # fmt: skip
        try:
            wait_for(lambda: is_answered(url), LIMIT_S, "the gateway")
            yield url, log
        finally:
            process.terminate()
            assert process.wait(LIMIT_S) == 0


def is_answered(url: str) -> bool:
    """Send a request on a connection of its own."""
    with contextlib.suppress(requests.ConnectionError):
        body = {"model": "demo", "prompt": "The server", "max_tokens": 2}
        return requests.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S).status_code == 200
    return False


def hold(stack: contextlib.ExitStack, url: str, first: bytes) -> list[socket.socket]:
    host, _, port = url.removeprefix("http://").partition(":")
    held = [
        stack.enter_context(socket.create_connection((host, int(port)), LIMIT_S)) for _ in range(NUM_HELD)
    ]  # fmt: skip
    for connection in held:
        with contextlib.suppress(ConnectionError):  # closed already
            connection.sendall(first)
    return held


def num_open(connections: list[socket.socket]) -> int:
    """Return how many the other side has not closed."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        return len(connections) - sum(is_at_end(key.fileobj) for key, _ in selector.select(0))


def is_at_end(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    ("attack", "num_workers"),
    [
        ("half headers", 1),
        ("half bodies", 2),
        *(pytest.param(attack, 1, marks=pytest.mark.slow) for attack in ("silent", "half bodies", "idle")),
    ],
)
def test_held_connections_lock_out_nobody(
    server: Server, case: Case, tmp_path: Path, attack: str, num_workers: int
) -> None:
    tmp_path.chmod(0o700)
    with case(), gateway(server, tmp_path, num_workers) as (url, log):
        with contextlib.ExitStack() as stack:
            held: list[socket.socket] = []
            for _ in range(ROUNDS):
                held += hold(stack, url, ATTACKS[attack])
                assert is_answered(url)
            wait_for(lambda: num_open(held) <= NUM_DESCRIPTORS // 2 * num_workers, LIMIT_S, "the bound")
            assert is_answered(url)
        text = log.read_text()
        assert "no room for more connections" in text
        assert "Traceback" not in text
        assert len(text.splitlines()) < 10 * num_workers
