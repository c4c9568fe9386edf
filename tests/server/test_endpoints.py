"""Ports that are free, in use, or left to choose."""

from __future__ import annotations

import errno
import socket

import pytest

from tidewheel.server import ServeError
from tidewheel.server.endpoints import Endpoints, free_port, is_loopback


def test_zero_takes_different_free_ports() -> None:
    assert Endpoints().chosen().openai is None
    ports = Endpoints(openai=0).chosen()
    numbers = {ports.http, ports.grpc, ports.metrics, ports.health, ports.openai}
    assert len(numbers) == 5
    for number in filter(None, numbers):
        with socket.socket() as one:
            one.bind(("127.0.0.1", number))


def test_a_port_in_use_is_named_with_its_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port} .* is in use: .*--grpc-port"):
            Endpoints(grpc=port).chosen()


def test_one_port_for_two_endpoints() -> None:
    free = Endpoints().chosen().http
    with pytest.raises(ServeError, match="--metrics-port"):
        Endpoints(http=free, metrics=free).chosen()


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_hosts_that_are_not_here(host: str) -> None:
    with pytest.raises(ServeError, match=f"--host is '{host}'"):
        Endpoints(host=host).chosen()


def test_a_machine_without_the_family_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", refused)
    with pytest.raises(ServeError, match=r"cannot listen on ::1 port 0 \(--port\): Address family not supported"):
        free_port("::1", 0, "--port")


def test_addresses() -> None:
    assert Endpoints(host="0.0.0.0").authority(1) == "127.0.0.1:1"
    assert Endpoints(host="::").authority(1) == "[::1]:1"
    assert Endpoints(host="10.0.0.1").authority(1) == "10.0.0.1:1"
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
