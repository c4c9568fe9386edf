"""Several servers: the least loaded one, what has the prompt cached, sessions, refusals, and what is not ready."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from support.gateway.running_gateway import RunningGateway, gateway_to, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, Refused, response, running
from support.triton.serving import wait_for
from tidewheel.gateway import upstream, upstreams
from tidewheel.gateway.gateway_options import Address
from tidewheel.health_endpoint import HealthEndpoint, Readiness


@pytest.fixture
def tritons() -> Iterator[tuple[FakeTriton, FakeTriton]]:
    with running(FakeTriton(answer=say)) as one, running(FakeTriton(answer=say)) as other:
        yield one, other


@pytest.fixture
def gateway(tritons: tuple[FakeTriton, FakeTriton]) -> Iterator[RunningGateway]:
    with gateway_to(*(triton.port for triton in tritons)) as both:
        yield both


def counts(tritons: tuple[FakeTriton, FakeTriton]) -> list[int]:
    return [len(triton.asked) for triton in tritons]


def ask_at_once(
    gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton], num: int, **fields: Any
) -> list[int]:
    """Return how many of `num` requests each server has while all of them are open."""
    release = threading.Event()

    def wait(asked: Asked) -> Answer:
        release.wait(60)
        yield from say(asked)

    for triton in tritons:
        triton.answer = wait
    with ThreadPoolExecutor(num) as pool:
        try:
            answers = []
            for number in range(num):
                answers.append(pool.submit(gateway.complete, **fields))
                wait_for(lambda before=number: sum(counts(tritons)) == before + 1, 60, "request")
            sent = counts(tritons)
        finally:
            release.set()
        assert all(answer.result().ok for answer in answers)
    return sent


def test_the_least_loaded_server_is_asked(gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]) -> None:
    assert ask_at_once(gateway, tritons, 4) == [2, 2]


def test_a_session_stays_with_its_server(gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]) -> None:
    for _ in range(4):
        assert gateway.complete(session_id="chat-7").ok
    assert sorted(counts(tritons)) == [0, 4]


def test_another_server_gets_what_one_refuses(
    gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    def refuse(asked: Asked) -> Answer:
        raise Refused(grpc.StatusCode.UNAVAILABLE, "[TW-BUSY retry_after_ms=10] waiting set is full")
        yield

    tritons[0].answer = refuse
    assert gateway.complete().ok
    assert counts(tritons) == [1, 1]
    assert "tidewheel_gateway_moved_total 1" in gateway.get("/metrics").text
    tritons[1].answer = refuse
    assert gateway.complete().status_code == 429


def test_what_has_begun_is_not_sent_again(gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]) -> None:
    def die(asked: Asked) -> Answer:
        yield response(asked.message, text_output="a", finish_reason="None")
        raise Refused(grpc.StatusCode.UNAVAILABLE, "[TW-ENGINE-DEAD] the engine died")

    for triton in tritons:
        triton.answer = die
    assert gateway.complete().status_code == 503
    assert counts(tritons) == [1, 0]


def test_a_server_that_is_not_ready_is_left_out(
    gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    first, second = tritons
    first.ready = False
    wait_for(lambda: gateway.upstreams.each[0].not_ready, 60, "look")
    assert gateway.complete().ok
    assert counts(tritons) == [0, 1]
    assert gateway.get("/health").json() == {"ready": True, "reason": ""}
    second.ready = False
    wait_for(lambda: gateway.get("/health").status_code == 503, 60, "look")
    assert gateway.complete().status_code == 503
    assert gateway.get("/v1/models").json()["data"], "the models are known"
    first.ready = second.ready = True
    wait_for(lambda: gateway.get("/health").ok, 60, "look")
    assert gateway.complete().ok


def test_a_server_that_became_ready_since_its_last_poll_gets_what_another_refuses(
    tritons: tuple[FakeTriton, FakeTriton], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drain(asked: Asked) -> Answer:
        raise Refused(grpc.StatusCode.UNAVAILABLE, "[TW-DRAINING] the server is shutting down")
        yield

    old, new = tritons
    old.answer, new.ready = drain, False
    monkeypatch.setattr(upstream, "LOOK_S", 1000.0)
    with gateway_to(old.port, new.port) as gateway:
        wait_for(lambda: gateway.upstreams.each[1].not_ready == "Triton is not ready", 60, "look")
        new.ready = True
        assert gateway.complete().ok
    assert counts(tritons) == [1, 1]


def test_readiness_is_that_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is ready, and its engine hangs. Each request for `/health` looks by itself."""
    monkeypatch.setattr(upstream, "LOOK_S", 1000.0)
    states = [Readiness("hung", "no step for 12 s")]
    endpoint = HealthEndpoint("127.0.0.1", 0, lambda: states[-1])
    try:
        with running(FakeTriton(answer=say)) as triton:
            address = Address.parse(f"127.0.0.1:{triton.port},health={endpoint.port}")
            with gateway_to(addresses=[address]) as gateway:
                health = gateway.get("/health")
                assert (health.status_code, health.json()["reason"]) == (503, "hung: no step for 12 s")
                states.append(Readiness("ready"))
                wait_for(lambda: gateway.get("/health").ok, 60, "look")
                assert gateway.complete().ok
                states.append(Readiness("reloading"))
                wait_for(lambda: not gateway.get("/health").ok, 60, "look")
    finally:
        endpoint.close()


def test_metrics_of_several_servers_are_told_apart(gateway: RunningGateway) -> None:
    text = gateway.get("/metrics").text
    for one in gateway.upstreams.each:
        assert f'tidewheel_gateway_upstream_ready{{upstream="{one.address.grpc}"}} 1' in text


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":8001", "host:http", "host:0", "host:8001,metrics", "host:8001,other=1", "h:1,health=x"],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"write \[dns:\]HOST:PORT"):
        Address.parse(text)


@pytest.mark.parametrize("text", ["h:1,cost=", "h:1,cost=-1", "h:1,cost=1,cost=2", "h:1,grpc=2", "h:1,metrics=0"])
def test_numbers_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"cost=N"):
        Address.parse(text)


def test_addresses() -> None:
    assert Address.parse("h:8001") == Address("h:8001")
    assert Address.parse("[::1]:1,health=3,metrics=2") == Address("[::1]:1", "[::1]:2", "[::1]:3")
    assert Address.parse("dns:h:1,metrics=2") == Address("h:1", "h:2", is_name_of_many=True)
    assert Address.parse("h:1,cost=5,http=2") == Address("h:1", http="h:2", cost=5)
    assert Address.parse("dns:h:1,cost=70000").at("10.0.0.1") == Address("10.0.0.1:1", cost=70000)
    assert Address.parse("dns:h:1,metrics=2").at("::1") == Address("[::1]:1", "[::1]:2")


class Names:
    """Name service of one name, `servers`."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = list(hosts)
        self.fails = False

    def __call__(self, host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        if host != "servers":
            return _getaddrinfo(host, port, *args, **kwargs)
        if self.fails or not self.hosts:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in self.hosts]


_getaddrinfo = socket.getaddrinfo


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    service = Names("127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", service)
    monkeypatch.setattr(upstreams, "RESOLVE_S", 0.02)
    return service


def test_servers_of_a_name_come_and_go(names: Names) -> None:
    release = threading.Event()

    def wait(asked: Asked) -> Answer:
        release.wait(60)
        yield from say(asked)

    with running(FakeTriton(answer=say)) as one, running(FakeTriton(answer=wait), f"127.0.0.2:{one.port}") as other:
        address = Address.parse(f"dns:servers:{one.port}")
        with gateway_to(addresses=[address]) as gateway, ThreadPoolExecutor(1) as pool:
            assert gateway.complete().ok
            names.hosts = ["127.0.0.2"]
            wait_for(lambda: authorities(gateway) == {f"127.0.0.2:{one.port}"}, 60, "the other server")
            wait_for(lambda: gateway.get("/health").ok, 60, "its readiness")
            running_there = pool.submit(gateway.complete)
            wait_for(lambda: len(other.asked) == 1, 60, "a request")
            names.hosts = ["127.0.0.1"]
            wait_for(lambda: authorities(gateway) == {f"127.0.0.1:{one.port}"}, 60, "the first server")
            release.set()
            assert running_there.result().ok  # a server that is gone ends what it has
            wait_for(lambda: gateway.get("/health").ok, 60, "its readiness")
            assert gateway.complete().ok
    assert (len(one.asked), len(other.asked)) == (2, 1)


def test_a_name_service_that_fails_leaves_the_servers(names: Names) -> None:
    with running(FakeTriton(answer=say)) as one:
        with gateway_to(addresses=[Address.parse(f"dns:servers:{one.port}")]) as gateway:
            names.fails = True
            assert [gateway.complete().ok for _ in range(3)] == [True] * 3
        with gateway_to(addresses=[Address.parse(f"dns:servers:{one.port}")]) as gateway:
            answer = gateway.complete()
            assert answer.status_code == 503
            assert f"servers:{one.port} has no address" in answer.text
            names.fails = False
            wait_for(lambda: gateway.complete().ok, 60, "the server")


def authorities(gateway: RunningGateway) -> set[str]:
    return {one.address.grpc for one in gateway.upstreams.each}


def test_prompts_that_share_their_beginning_go_to_one_server(
    gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    shared = "Be brief. " * 500  # more than four chunks
    for number in range(4):
        assert gateway.complete(f"{shared} question {number}").ok
    assert sorted(counts(tritons)) == [0, 4]


def test_a_busy_server_keeps_no_session_from_being_answered(
    gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    """Two streams of a session are at home. A third goes to the other server: the bound is 1.25 of the mean."""
    assert sorted(ask_at_once(gateway, tritons, 3, session_id="chat-7")) == [1, 2]


def test_an_ended_request_counts_no_more(gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]) -> None:
    for number in range(3):
        assert gateway.complete(f"{number}").ok
    router = gateway.upstreams._router
    assert len(router.slots) == 2 and router.total_open == 0
    taken = list(router.slots.values())
    assert not router.waiting[:, taken].any() and not router.running[taken].any()
