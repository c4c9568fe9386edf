"""Connections that keep the gateway waiting make room for new ones; those that wait for an answer stay."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from aiohttp import web

from support.gateway.running_gateway import RunningGateway, gateway_to, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, running
from support.triton.serving import wait_for
from tidewheel.gateway import client_connections
from tidewheel.gateway.client_connections import ClientConnection, ConnectionTable, HttpListener
from tidewheel.gateway.gateway_options import GatewayOptions

NUM_DESCRIPTORS = 59
TABLE = ConnectionTable(NUM_DESCRIPTORS)
HALF_HEADER = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Slow: "
HALF_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
)
LARGE = 8 << 20  # bytes of an answer, more than sockets hold
LIMIT_S = 60


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with running(FakeTriton(models=("demo",), answer=say)) as fake:
        yield fake


@pytest.fixture
def small(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningGateway]:
    """Gateway that may have few connections."""
    monkeypatch.setattr(client_connections, "raise_descriptor_limit", lambda: NUM_DESCRIPTORS)
    with gateway_to(triton.port) as gateway:
        yield gateway


def opened(gateway: RunningGateway, first: bytes, source: str = "127.0.0.1") -> socket.socket:
    where = urlsplit(gateway.url)
    connection = socket.create_connection((where.hostname, where.port), LIMIT_S, source_address=(source, 0))
    connection.sendall(first)
    return connection


def asked(gateway: RunningGateway, source: str = "127.0.0.1") -> http.client.HTTPConnection:
    """Send a request on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=LIMIT_S, source_address=(source, 0))
    body = json.dumps({"prompt": "one two"})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        while connection.recv(1 << 16):
            pass
        return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_headers_that_do_not_arrive_end_their_connections(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gateway_to(triton.port) as gateway, ExitStack() as stack:
        idle = http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=LIMIT_S)
        idle.request("GET", "/v1/models")
        assert len(json.loads(idle.getresponse().read())["data"]) == 1
        second = stack.enter_context(opened(gateway, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
        assert second.recv(1 << 16).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(client_connections, "HEADERS_S", 0.2)
        silent, slow = (stack.enter_context(opened(gateway, first)) for first in (b"", HALF_HEADER))
        second.sendall(HALF_HEADER)
        wait_for(lambda: is_closed(silent), LIMIT_S, "the end of a silent connection")
        wait_for(lambda: is_closed(second), LIMIT_S, "the end of a second request")

        def is_slow_closed() -> bool:
            try:
                slow.sendall(b"x")
            except ConnectionError:
                return True
            return is_closed(slow)

        wait_for(is_slow_closed, LIMIT_S, "the end of slow headers")
        idle.request("GET", "/v1/models")
        assert idle.getresponse().status == 200


def test_the_rest_of_a_body_that_was_answered_early_is_not_taken_for_headers(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited: dict[bytes, bool] = {}  # by the data that the connection received last
    receive = ClientConnection.data_received

    def note_limit(connection: ClientConnection, data: bytes) -> None:
        receive(connection, data)
        if data:
            connection.data_received(b"")  # as aiohttp does after a pause
            limited[data] = connection._deadline is not None

    monkeypatch.setattr(ClientConnection, "data_received", note_limit)
    with gateway_to(triton.port, max_body_bytes=50) as gateway, opened(gateway, HALF_BODY) as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 413
        answer.read()
        for data in (b"x" * 40, b"y" * 58, HALF_HEADER):
            connection.sendall(data)
            wait_for(lambda data=data: data in limited, LIMIT_S, "data")
        assert [limited[data] for data in (b"x" * 40, b"y" * 58, HALF_HEADER)] == [False, False, True]


@pytest.mark.parametrize(
    ("first", "answer"),
    [
        (b"", b""),
        (HALF_HEADER, b""),
        (HALF_BODY, b""),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200"),
    ],
)
def test_connections_that_keep_it_waiting_make_room(small: RunningGateway, first: bytes, answer: bytes) -> None:
    with ExitStack() as stack:
        held = []
        for _ in range(3 * TABLE.most_of_address):
            held.append(stack.enter_context(opened(small, first)))
            assert held[-1].recv(len(answer), socket.MSG_WAITALL) == answer  # until then, none may take its place
        with asked(small).getresponse() as latest:
            assert latest.status == 200
        closed = [is_closed(connection) for connection in held]
        assert sum(closed) >= 2 * TABLE.most_of_address
        assert not closed[-1]


def test_an_answer_that_is_not_read_makes_room(small: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda request: say(request, text_output="x" * LARGE)
    unread = [asked(small) for _ in range(TABLE.most_of_address)]
    wait_for(lambda: len(triton.asked) == len(unread), LIMIT_S, "requests")
    wait_for(lambda: listed(small) == 200, LIMIT_S, "room")
    assert any(is_closed(connection.sock) for connection in unread)


def listed(gateway: RunningGateway) -> int:
    """Return the status of an answer on a connection of its own."""
    return requests.get(f"{gateway.url}/v1/models", timeout=LIMIT_S).status_code


def refusal(gateway: RunningGateway, source: str = "127.0.0.1") -> str:
    """Return the answer to a connection that has sent nothing."""
    with opened(gateway, b"", source) as connection, connection.makefile("rb") as stream:
        return stream.read().decode()


def test_requests_that_are_answered_stay_and_others_are_refused(small: RunningGateway, triton: FakeTriton) -> None:
    ends = threading.Event()

    def wait_and_say(request: Asked) -> Answer:
        assert ends.wait(LIMIT_S)
        yield from say(request)

    triton.answer = wait_and_say
    waiting = [asked(small) for _ in range(TABLE.most_of_address)]
    wait_for(lambda: len(triton.asked) == len(waiting), LIMIT_S, "requests")
    head, _, body = refusal(small).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 429 Too Many Requests\r\n")
    assert "\r\nRetry-After: 1\r\n" in head
    assert json.loads(body)["error"]["tag"] == "TW-BUSY"
    others = [asked(small, "127.0.0.2") for _ in range(TABLE.most - TABLE.most_of_address)]
    wait_for(lambda: len(triton.asked) == TABLE.most, LIMIT_S, "requests of another address")
    assert refusal(small, "127.0.0.3").startswith("HTTP/1.1 429 ")
    ends.set()
    assert {connection.getresponse().status for connection in (*waiting, *others)} == {200}
    wait_for(lambda: asked(small).getresponse().status == 200, LIMIT_S, "room")


def test_an_address_without_connections_leaves_nothing() -> None:
    table = ConnectionTable(NUM_DESCRIPTORS)

    class Connection(SimpleNamespace):
        __hash__ = object.__hash__

    def entered(address: str) -> tuple[Any, bool]:
        connection: Any = Connection(address=address)
        has_entered = table.enter(connection)
        table.note(connection, "served")
        return connection, has_entered

    held = [entered(f"192.0.2.{number % 2}") for number in range(table.most)]
    others = [entered(f"198.51.100.{number}") for number in range(3)]
    assert [has_entered for _, has_entered in (*held, *others)] == [True] * table.most + [False] * 3
    assert len(table._groups) == 3
    for connection, _ in held:
        table.leave(connection)
        table.note(connection, "served")
    assert len(table._groups) == 0


def test_one_shortage_of_descriptors_makes_room_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[ConnectionTable] = []
    monkeypatch.setattr(ConnectionTable, "make_room", lambda table: rooms.append(table))

    async def count_rooms() -> list[int]:
        listener = await HttpListener.open(web.Application(), GatewayOptions(port=0, drain_s=0))
        loop = asyncio.get_running_loop()
        counts = []
        for _ in range(2):
            for _ in range(128):
                shortage = OSError(errno.EMFILE, "Too many open files")
                loop.call_exception_handler({"message": "accept", "exception": shortage, "socket": None})
            counts.append(len(rooms))
            await asyncio.sleep(0)  # the loop's next iteration
        await listener.cleanup()
        return counts

    assert asyncio.run(count_rooms()) == [1, 2]


def test_errors_of_the_loop_are_logged_without_their_messages(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        listener = await HttpListener.open(web.Application(), GatewayOptions(port=0, drain_s=0))
        context = {"message": "no task took it", "exception": ValueError("a prompt")}
        asyncio.get_running_loop().call_exception_handler(context)
        await listener.cleanup()

    asyncio.run(fail())
    assert "no task took it\nValueError (its message is not shown)" in caplog.text
    assert "a prompt" not in caplog.text


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("192.0.2.7", 5), "192.0.2.7"),
        (("2001:db8:1:2:3::4", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
    ],
)
def test_an_ipv6_network_counts_as_one_address(peer: tuple[str, int], address: str) -> None:
    assert client_connections._address_of(peer) == address
