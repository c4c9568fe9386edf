"""Web pages of other origins: which may ask, and read the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from support.gateway.running_gateway import RunningGateway, entry, gateway_to, say
from support.triton.grpc_triton import FakeTriton, running
from tidewheel.cli.main import main

APP, OTHER = "https://app.example", "https://app.example.evil"
ALLOW = "Access-Control-Allow-Origin"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with running(FakeTriton(models=("demo",))) as one:
        one.answer = say
        yield one


@pytest.fixture
def gateway(triton: FakeTriton, tmp_path: Path) -> Iterator[RunningGateway]:
    (tmp_path / "keys.toml").write_text(entry("alice"))
    origins = (APP, "http://localhost:5173")
    with gateway_to(triton.port, keys=tmp_path / "keys.toml", cors_origin=origins) as one:
        yield one


def preflight(gateway: RunningGateway, origin: str, path: str = "/v1/chat/completions") -> requests.Response:
    headers = {"Origin": origin, **PREFLIGHT}
    return gateway.session.request("OPTIONS", f"{gateway.url}{path}", headers=headers, timeout=30)


def shown(answer: requests.Response) -> set[str]:
    return {name.lower() for name in answer.headers if name.lower().startswith("access-control-")}


@pytest.mark.parametrize("origin", [APP, "http://localhost:5173"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/messages", "/v1/responses/x"])
def test_a_preflight_needs_no_key(gateway: RunningGateway, origin: str, path: str) -> None:
    answer = preflight(gateway, origin, path)
    assert (answer.status_code, answer.text, answer.headers[ALLOW], answer.headers["Vary"]) == (
        204, "", origin, "Origin",
    )  # fmt: skip
    assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE"
    assert answer.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "access-control-allow-credentials" not in shown(answer)


@pytest.mark.parametrize("origin", [OTHER, "http://app.example", f"{APP}:444", "null", "*", APP.upper(), ""])
def test_another_origin_is_not_allowed(gateway: RunningGateway, origin: str) -> None:
    refused = preflight(gateway, origin)
    assert (refused.status_code, shown(refused), refused.headers["Vary"]) == (401, set(), "Origin")
    answer = gateway.chat(stream=True, headers={"Origin": origin, "Authorization": "Bearer alice"})
    assert (answer.status_code, shown(answer), answer.headers["Vary"]) == (200, set(), "Origin")


def test_headers_of_any_bytes_are_answered(gateway: RunningGateway) -> None:
    strange = {**PREFLIGHT, "Access-Control-Request-Headers": b"x-\xff,y"}  # requests sends bytes as they are
    for origin in (APP.encode(), b"\xff", APP.encode() + b"\xff"):
        headers = {"Origin": origin, **strange}
        answer = gateway.session.request("OPTIONS", f"{gateway.url}/v1/models", headers=headers, timeout=30)
        assert answer.status_code == (204 if origin == APP.encode() else 401)


def test_options_that_are_no_preflight_are_as_before(gateway: RunningGateway) -> None:
    headers = {"Origin": APP, "Authorization": "Bearer alice"}
    answer = gateway.session.request("OPTIONS", f"{gateway.url}/v1/models", headers=headers, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


def test_answers_streams_and_errors_can_be_read(gateway: RunningGateway, triton: FakeTriton) -> None:
    headers = {"Origin": APP, "Authorization": "Bearer alice"}
    answers = [gateway.chat(stream=stream, headers=headers) for stream in (False, True)]
    answers += [gateway.get(path, headers=headers) for path in ("/v1/models", "/health", "/metrics", "/")]
    errors = [gateway.chat(headers={"Origin": APP}), gateway.get("/v1/nothing", headers=headers)]
    errors += [gateway.get("/v1/completions", headers=headers), gateway.post("messages", b"{", headers=headers)]
    triton.refuse_and_listen("[TW-BUSY retry_after_ms=250] waiting set is full")
    errors.append(gateway.chat(stream=True, headers=headers))
    assert [answer.status_code for answer in errors] == [401, 404, 405, 400, 429]
    assert all(answer.ok for answer in answers)
    for answer in (*answers, *errors):
        assert (answer.headers[ALLOW], answer.headers["Vary"]) == (APP, "Origin")
        assert "retry-after-ms" in answer.headers["Access-Control-Expose-Headers"]
        assert shown(answer).isdisjoint({"access-control-allow-credentials", "access-control-allow-headers"})


def test_every_origin_is_allowed_on_purpose(triton: FakeTriton) -> None:
    with gateway_to(triton.port, cors_origin=(APP, "*")) as gateway:
        for origin in (APP, OTHER, "null"):
            for answer in (preflight(gateway, origin), gateway.chat(headers={"Origin": origin})):
                assert (answer.ok, answer.headers[ALLOW]) == (True, "*")
                assert "access-control-allow-credentials" not in shown(answer)
                assert "Vary" not in answer.headers
        assert shown(gateway.chat()) == set()


def test_none_is_allowed_by_default(triton: FakeTriton) -> None:
    with gateway_to(triton.port) as gateway:
        assert preflight(gateway, APP).status_code == 405
        answer = gateway.chat(headers={"Origin": APP})
        assert (answer.ok, shown(answer), "Vary" in answer.headers) == (True, set(), False)


@pytest.mark.parametrize(
    "origin",
    [
        "", "app.example", "https://", f"{APP}/", f"{APP}/x", f"{APP}:443", "http://a:80", "https://*.example",
        "null", "https://me@app.example", "HTTPS://app.example", "https://bücher.example", f"{APP} ", "https://a:",
        "**", f"{APP},https://b", "https://a:99999999",
    ],
)  # fmt: skip
def test_what_is_no_origin_is_refused_by_name(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["gateway", "--cors-origin", APP, f"--cors-origin={origin}"])
    assert ended.value.code == 2
    assert f"argument --cors-origin: {origin!r} is no origin: write SCHEME://HOST[:PORT]" in capsys.readouterr().err


@pytest.mark.parametrize("origin", [APP, "http://[::1]:3000", "chrome-extension://abcdef", "tauri://localhost", "*"])
def test_serve_takes_origins_with_a_gateway_alone(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "x", "--cors-origin", origin]) == 2
    assert "--cors-origin goes with --openai-port: it is of the gateway" in capsys.readouterr().err
