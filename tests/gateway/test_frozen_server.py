"""A server that stops answering: what becomes of the requests that it has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from support.gateway.running_gateway import gateway_to, say
from support.triton.grpc_triton import FakeTriton, running
from support.triton.serving import free_ports, wait_for
from support.triton.stoppable_triton import StoppableTriton, stoppable_triton
from tidewheel.gateway import upstream
from tidewheel.gateway.gateway_options import Address
from tidewheel.health_endpoint import READY, HealthEndpoint, Readiness, State


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "LOOK_S", 0.05)
    monkeypatch.setattr(upstream, "PROBE_S", 1.0)
    monkeypatch.setattr(upstream, "SILENCE_S", 1.0)


@pytest.fixture
def first() -> Iterator[StoppableTriton]:
    with stoppable_triton() as triton:
        yield triton


def address_of(triton: StoppableTriton, health: str = "") -> Address:
    return Address(f"127.0.0.1:{triton.port}", health=health)


@contextmanager
def reporting(states: list[Readiness]) -> Iterator[str]:
    """Report the last of the states at the address."""
    endpoint = HealthEndpoint("127.0.0.1", 0, lambda: states[-1])
    try:
        yield f"127.0.0.1:{endpoint.port}"
    finally:
        endpoint.close()


def behind(*ports: int) -> list[Address]:
    """Return addresses of servers, of which the first is preferred."""
    return [Address.parse(f"127.0.0.1:{port},cost={cost}") for cost, port in enumerate(ports)]


def error_of(stream: str) -> str:
    """Return the message of the error that ends a stream, and is there once."""
    lines = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line]
    assert [line["choices"][0]["text"] for line in lines[:-1]] == ["a"]
    assert lines[-1]["error"]["tag"] == "TW-ENGINE-DEAD"
    return str(lines[-1]["error"]["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_a_frozen_server(first: StoppableTriton, stream: bool) -> None:
    with running(FakeTriton(answer=say)) as other, gateway_to(addresses=behind(first.port, other.port)) as gateway:
        with ThreadPoolExecutor(2) as pool:
            begun = pool.submit(gateway.complete, "begin", stream=True)
            first.next_line()
            waits = pool.submit(gateway.complete, "wait", stream=stream)
            asked = first.next_line()
            wait_for(lambda: gateway.upstreams.each[0].num_responses, 60, "the first token")
            first.stop()
            moved, text = waits.result(), begun.result().text
        assert error_of(text).startswith("the server was lost while it answered: ")
        assert moved.ok and moved.text.count("[DONE]") == stream and len(other.asked) == 1
        assert gateway.upstreams.num_moved == 1
        assert {one.num_open for one in gateway.upstreams.each} == {0}
        assert gateway.complete("word").ok and len(other.asked) == 2
        first.go_on()
        assert {first.next_line().split()[0] for _ in range(2)} == {"cancelled"}, asked
        wait_for(lambda: not gateway.upstreams.each[0].not_ready, 60, "the server that goes on")
        assert gateway.complete("word").ok and len(other.asked) == 2


def test_a_frozen_server_alone(first: StoppableTriton) -> None:
    with gateway_to(addresses=[address_of(first)]) as gateway:
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(gateway.complete, "wait")
            first.next_line()
            first.stop()
            answer = waits.result()
        assert answer.status_code == 503 and answer.headers["x-should-retry"] == "true"
        assert gateway.get("/health").status_code == 503
        first.go_on()
        wait_for(lambda: gateway.get("/health").ok, 60, "the server that goes on")
        assert gateway.complete("word").ok


def test_a_silent_health_port_alone_ends_nothing(first: StoppableTriton) -> None:
    """The process that tells readiness may stop while Triton answers."""
    address = address_of(first)._replace(health="127.0.0.1:1")
    with gateway_to(addresses=[address_of(first)]) as gateway, ThreadPoolExecutor(1) as pool:
        begun = pool.submit(gateway.complete, "begin", stream=True)
        first.next_line()
        gateway.upstreams.each[0].address = address
        wait_for(lambda: gateway.upstreams.each[0].not_ready, 60, "look")
        with pytest.raises(TimeoutError):
            begun.result(2 * upstream.PROBE_S)
        first.process.kill()
        error_of(begun.result().text)


@pytest.mark.parametrize("state", ["hung", "reloading"])
def test_a_server_that_answers_keeps_its_requests(first: StoppableTriton, state: State) -> None:
    states = [READY]
    with (
        reporting(states) as health,
        gateway_to(addresses=[address_of(first, health)]) as gateway,
        ThreadPoolExecutor(2) as pool,
    ):
        begun, waits = (pool.submit(gateway.complete, prompt, stream=True) for prompt in ("begin", "wait"))
        assert {first.next_line().split()[0] for _ in range(2)} == {"asked"}
        states.append(Readiness(state, "no step for 12 s"))
        wait_for(lambda: gateway.upstreams.each[0].not_ready, 60, "look")
        with pytest.raises(TimeoutError):
            begun.result(2 * (upstream.PROBE_S + upstream.SILENCE_S))
        assert not waits.done()
        first.process.kill()
        error_of(begun.result().text)
        assert waits.result().status_code == 503


def test_a_gateway_that_was_late_itself_ends_nothing(first: StoppableTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that come while its process does not run are read after the time limit."""
    monkeypatch.setattr(upstream, "LATE_S", -1.0)
    with gateway_to(addresses=[address_of(first)]) as gateway, ThreadPoolExecutor(1) as pool:
        begun = pool.submit(gateway.complete, "begin", stream=True)
        wait_for(lambda: gateway.upstreams.each[0].num_responses, 60, "the first token")
        first.stop()
        with pytest.raises(TimeoutError):
            begun.result(2 * (upstream.PROBE_S + upstream.SILENCE_S))
        monkeypatch.setattr(upstream, "LATE_S", 60.0)
        error_of(begun.result().text)


def test_a_server_that_starts_is_used_once_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is ready, no call delays the connection: after a failed one, gRPC waits for a second."""
    monkeypatch.setattr(upstream, "SILENCE_S", 60.0)  # a slow look is no silence
    states = [Readiness("starting")]
    (port,) = free_ports(1)
    address = Address(f"127.0.0.1:{port}")
    with reporting(states) as health, gateway_to(addresses=[address._replace(health=health)]) as gateway:
        one = gateway.upstreams.each[0]
        for _ in range(5):
            looked_at = one._looked_at
            wait_for(lambda at=looked_at: one._looked_at > at, 60, "look")
        assert one.triton._channel.get_state() == grpc.ChannelConnectivity.IDLE
        with running(FakeTriton(answer=say), address.grpc):
            states.append(READY)
            wait_for(lambda: gateway.complete().ok, 60, "the server")
