"""Triton's `generate` through the gateway: what it passes on, to which server, and what it refuses itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from support.gateway.running_gateway import entry, gateway_to, say
from support.triton.grpc_triton import FakeTriton, running
from support.triton.http_triton import Body, FakeHttpTriton, HttpError, error_body
from tidewheel.gateway.gateway_options import Address

LIMIT_S = 60


@pytest.fixture
def https() -> Iterator[tuple[FakeHttpTriton, FakeHttpTriton]]:
    with FakeHttpTriton() as one, FakeHttpTriton() as other:
        yield one, other


@pytest.fixture
def tritons() -> Iterator[tuple[FakeTriton, FakeTriton]]:
    with running(FakeTriton(answer=say)) as one, running(FakeTriton(answer=say)) as other:
        yield one, other


@pytest.fixture
def addresses(tritons: tuple[FakeTriton, FakeTriton], https: tuple[FakeHttpTriton, FakeHttpTriton]) -> list[Address]:
    ports = [one.url.rpartition(":")[2] for one in https]
    return [Address.parse(f"127.0.0.1:{one.port},http={port}") for one, port in zip(tritons, ports, strict=True)]


def post(url: str, path: str, body: Body, **headers: str) -> requests.Response:
    return requests.post(f"{url}/v2/models/{path}", json=body, headers=headers, timeout=LIMIT_S)


def test_answers_are_those_of_the_server(
    addresses: list[Address], https: tuple[FakeHttpTriton, FakeHttpTriton]
) -> None:
    body = {"text_input": "one two", "max_tokens": 3, "session_id": "s"}
    with gateway_to(addresses=addresses) as gateway:
        streamed = post(gateway.url, "demo/generate_stream", body)
        whole = post(gateway.url, "demo/generate", body)
    assert streamed.headers["Content-Type"].startswith("text/event-stream")
    assert [line.partition(": ")[0] for line in streamed.text.split("\n\n") if line] == ["data", "data"]
    assert whole.json()["outputs"][0]["data"] == ["an answer"]
    asked = https[0].asked + https[1].asked
    assert asked == [("/v2/models/demo/generate_stream", body), ("/v2/models/demo/generate", body)]
    assert [] in [https[0].asked, https[1].asked], "a session stays with its server"


def test_what_one_refuses_goes_to_the_other(
    addresses: list[Address], https: tuple[FakeHttpTriton, FakeHttpTriton]
) -> None:
    def refuse(body: Body) -> Body:
        raise HttpError(400, error_body("[TW-BUSY retry_after_ms=10] the waiting set is full"))

    with gateway_to(addresses=addresses) as gateway:
        https[0].answer = refuse
        assert [post(gateway.url, "demo/generate", {"text_input": "a"}).status_code for _ in range(2)] == [200, 200]
        https[1].answer = refuse
        answer = post(gateway.url, "demo/generate", {"text_input": "a"})
    assert answer.status_code == 429
    assert answer.json() == {"error": "[TW-BUSY retry_after_ms=10] the waiting set is full"}


def test_a_server_that_is_lost_is_told_in_its_stream(
    addresses: list[Address], https: tuple[FakeHttpTriton, FakeHttpTriton]
) -> None:
    def die(body: Body) -> Iterator[Body]:
        yield {"text_output": "a"}
        raise ConnectionError

    https[0].events = https[1].events = die
    with gateway_to(addresses=addresses) as gateway:
        text = post(gateway.url, "demo/generate_stream", {"text_input": "a"}).text
        assert len(https[0].asked) + len(https[1].asked) == 1
    first, last = text.strip().split("\n\n")
    assert "text_output" in first
    assert '"error":"[TW-ENGINE-DEAD] the server was lost' in last


def test_what_the_gateway_refuses_is_an_error_as_triton_writes_them(
    addresses: list[Address], tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    with gateway_to(addresses=addresses) as gateway:
        unknown = post(gateway.url, "other/generate", {"text_input": "a"})
        assert (unknown.status_code, list(unknown.json())) == (404, ["error"])
        headers = {"Content-Type": "application/json"}
        url = f"{gateway.url}/v2/models/demo/generate"
        no_json = requests.post(url, data="{", headers=headers, timeout=LIMIT_S)
        assert (no_json.status_code, "[TW-INPUT]" in no_json.json()["error"]) == (400, True)
    with gateway_to(tritons[0].port) as gateway:
        no_port = post(gateway.url, "demo/generate", {"text_input": "a"})
    assert (no_port.status_code, "http=PORT" in no_port.json()["error"]) == (400, True)


@pytest.mark.parametrize("priority", [1, 1.0, "1", " 2 ", "0", 0, "high", " Normal"])
def test_tenant_and_class_are_those_of_the_key(
    priority: object, addresses: list[Address], https: tuple[FakeHttpTriton, FakeHttpTriton], tmp_path: Path
) -> None:
    (tmp_path / "keys.toml").write_text(entry("alice", tenant="acme", max_priority=3))
    with gateway_to(addresses=addresses, keys=tmp_path / "keys.toml") as gateway:
        body = {"text_input": "a", "priority": priority}
        assert post(gateway.url, "demo/generate", body).status_code == 401
        assert post(gateway.url, "demo/generate", body, Authorization="Bearer alice").ok
        named = post(gateway.url, "demo/generate", body | {"tenant": "b"}, Authorization="Bearer alice")
        assert (named.status_code, "tenant" in named.json()["error"]) == (400, True)
        other = post(gateway.url, "demo/generate", body | {"priority": "+1"}, Authorization="Bearer alice")
        assert (other.status_code, "priority is +1" in other.json()["error"]) == (400, True)
    ((_, sent),) = https[0].asked + https[1].asked
    assert (sent["tenant"], sent["priority"]) == ("acme", 3)


def test_parameters_inside_parameters_count_as_those_beside_them(
    addresses: list[Address], https: tuple[FakeHttpTriton, FakeHttpTriton], tmp_path: Path
) -> None:
    (tmp_path / "keys.toml").write_text(entry("alice", tenant="acme", max_priority=3))
    with gateway_to(addresses=addresses, keys=tmp_path / "keys.toml") as gateway:

        def ask(**fields: object) -> requests.Response:
            return post(gateway.url, "demo/generate", {"text_input": "a", **fields}, Authorization="Bearer alice")

        assert ask(parameters={"priority": 1, "max_tokens": 3}).ok
        refused = [
            (ask(parameters={"tenant": "b"}), "the API key decides it"),
            (ask(parameters={"priority": 1}, priority=4), "priority stands in parameters and beside it"),
            (ask(parameters=[]), "parameters must be an object"),
        ]
        assert all(answer.status_code == 400 and words in answer.json()["error"] for answer, words in refused)
    ((_, sent),) = https[0].asked + https[1].asked
    assert sent == {"text_input": "a", "max_tokens": 3, "tenant": "acme", "priority": 3}
