"""LoRA adapters behind the gateway: names of the field `model`, loads and unloads, and the choice of a server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.gateway.running_gateway import RunningGateway, entry, gateway_to, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, response, running
from support.triton.http_triton import FakeHttpTriton
from support.triton.serving import wait_for
from tidewheel.gateway import loras
from tidewheel.gateway.bodies import UpstreamRequest
from tidewheel.gateway.gateway_options import Address
from tidewheel.gateway.upstreams import CHUNK_TOKENS, route_request

MESSAGES = [{"role": "user", "content": "one two"}]
# Path → fields of a request.
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES},
    "completions": {"prompt": "one two"},
    "responses": {"input": "one two"},
    "messages": {"messages": MESSAGES, "max_tokens": 9},
}


@pytest.fixture
def tritons() -> Iterator[tuple[FakeTriton, FakeTriton]]:
    with running(FakeTriton(answer=say)) as one, running(FakeTriton(answer=say)) as other:
        yield one, other


@pytest.fixture
def triton(tritons: tuple[FakeTriton, FakeTriton]) -> FakeTriton:
    tritons[0].loras = {"demo": {"sql": "/loras/sql", "fr": "/loras/fr"}, "zebra": {"fr": "/z/fr", "demo": "/z/demo"}}
    return tritons[0]


@pytest.fixture
def gateway(triton: FakeTriton) -> Iterator[RunningGateway]:
    with gateway_to(triton.port) as one:
        yield one


@pytest.fixture
def both(tritons: tuple[FakeTriton, FakeTriton], monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningGateway]:
    monkeypatch.setattr(loras, "LIST_INTERVAL_S", 0.0)
    with gateway_to(*(one.port for one in tritons)) as gateway:
        yield gateway


def order(gateway: RunningGateway, kind: str, headers: Any = None, **fields: Any) -> Any:
    return gateway.post(f"{kind}_lora_adapter", fields, headers=headers or {})


def lists(triton: FakeTriton) -> int:
    return sum(one["lora_order"] == "list" and one["model"] == "demo" for one in triton.lora_orders)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_model_may_be_an_adapter(gateway: RunningGateway, triton: FakeTriton, path: str, stream: bool) -> None:
    answer = gateway.post(path, {"model": "sql", "stream": stream, **BODIES[path]})
    answer.raise_for_status()
    (asked,) = triton.asked
    assert (asked.message.model_name, asked.sampling["lora_name"]) == ("demo", "sql")
    assert '"model":"sql"' in answer.text
    assert '"model":"demo"' not in answer.text


def test_a_served_model_wins_and_the_full_name_reaches_its_namesake(
    gateway: RunningGateway, triton: FakeTriton
) -> None:
    assert gateway.complete(model="demo").json()["model"] == "demo"
    assert gateway.complete(model="zebra/demo").json()["model"] == "zebra/demo"
    plain, tuned = triton.asked
    assert (plain.message.model_name, "lora_name" in plain.sampling) == ("demo", False)
    assert (tuned.message.model_name, tuned.sampling["lora_name"]) == ("zebra", "demo")


def test_a_name_of_several_models_needs_the_model(gateway: RunningGateway, triton: FakeTriton) -> None:
    answer = gateway.complete(model="fr")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], "demo/fr or zebra/fr" in error["message"]) == ("model", True)
    assert triton.asked == []
    assert gateway.complete(model="zebra/fr").ok
    assert triton.asked[0].message.model_name == "zebra"


def test_a_served_model_asks_for_no_adapters(gateway: RunningGateway, triton: FakeTriton) -> None:
    assert gateway.complete(model="demo").ok
    assert triton.lora_orders == []


def test_the_field_of_the_body_is_passed_on(gateway: RunningGateway, triton: FakeTriton) -> None:
    assert gateway.complete(lora_name="unlisted").ok
    assert triton.asked[0].sampling["lora_name"] == "unlisted"
    assert gateway.complete(model="sql", lora_name="sql").ok
    twice = gateway.complete(model="sql", lora_name="fr")
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "lora_name")
    assert gateway.complete(model="sql", lora_name=["fr"]).status_code == 400


def test_embeddings_take_adapters_and_tokens_are_those_of_the_model(
    gateway: RunningGateway, triton: FakeTriton
) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.inputs["task"] == "embed":
            yield response(asked.message, text_output="", finish_reason="stop", embedding=("FP32", "f", [0.6, 0.8]))
        else:
            text = '{"count": 2, "tokens": [1, 2]}'
            yield response(asked.message, text_output=text, finish_reason="stop")

    triton.answer = answer
    embedded = gateway.post("embeddings", {"model": "sql", "input": ["a", "b"]}).json()
    assert (embedded["model"], len(embedded["data"])) == ("sql", 2)
    assert all(asked.sampling["lora_name"] == "sql" for asked in triton.asked)
    triton.asked.clear()
    assert gateway.post("../tokenize", {"model": "sql", "prompt": "a b"}).json()["count"] == 2
    assert gateway.post("messages/count_tokens", {"model": "sql", "messages": MESSAGES}).json() == {"input_tokens": 2}
    assert all(asked.message.model_name == "demo" and "lora_name" not in asked.sampling for asked in triton.asked)


def test_models_lists_adapters(gateway: RunningGateway) -> None:
    cards = {card["id"]: card for card in gateway.get("/v1/models").json()["data"]}
    assert list(cards) == ["demo", "zebra", "demo/fr", "sql", "zebra/demo", "zebra/fr"]
    assert "parent" not in cards["demo"]
    assert (cards["sql"]["parent"], cards["sql"]["root"]) == ("demo", "/loras/sql")
    assert (cards["zebra/fr"]["parent"], cards["zebra/fr"]["root"]) == ("zebra", "/z/fr")
    for name, card in cards.items():
        assert gateway.get(f"/v1/models/{name}").json() == card
        assert gateway.complete(model=name).ok


@pytest.mark.parametrize("name", ["missing", "demo/missing", "a\nb", "\0", "x" * 100_000, "/", "demo/", "é\ud800"])
@pytest.mark.parametrize(
    ("path", "kind"), [("completions", "invalid_request_error"), ("messages", "not_found_error")]
)
def test_unknown_names_are_not_found_in_each_api_s_shape(
    gateway: RunningGateway, triton: FakeTriton, name: str, path: str, kind: str
) -> None:
    answer = gateway.post(path, json.dumps({"model": name, **BODIES[path]}).encode())
    assert answer.status_code == (400 if "\ud800" in name else 404), answer.text
    assert "\n" not in answer.text
    if answer.status_code == 404:
        assert answer.json()["error"]["type"] == kind
    assert triton.asked == []


def test_unknown_names_ask_the_servers_at_a_bounded_rate(
    gateway: RunningGateway, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras, "LIST_INTERVAL_S", 0.3)
    begun = time.monotonic()
    with ThreadPoolExecutor(10) as pool:
        answers = pool.map(lambda number: gateway.complete(model=f"typo{number}").status_code, range(30))
        assert list(answers) == [404] * 30
    assert lists(triton) <= 1 + (time.monotonic() - begun) / 0.3


def test_an_adapter_that_another_worker_has_loaded_is_found_at_once(
    gateway: RunningGateway, triton: FakeTriton
) -> None:
    assert gateway.complete(model="new").status_code == 404
    triton.loras["demo"]["new"] = "/loras/new"
    assert gateway.complete(model="new").ok
    assert all(gateway.get("/v1/models").ok for _ in range(5)), "they wait for nothing"


def test_lists_in_use_are_asked_for_again_in_the_background(
    gateway: RunningGateway, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gateway.complete(model="sql").ok
    monkeypatch.setattr(loras, "LIST_INTERVAL_S", 0.0)
    monkeypatch.setattr(loras, "MAX_LIST_AGE_S", 0.0)
    triton.loras["demo"].pop("sql")
    assert gateway.complete(model="sql").ok, "the server has the last word"
    wait_for(lambda: gateway.complete(model="sql").status_code == 404, 60, "the new list")


def test_adapters_of_an_unloaded_model_are_gone(gateway: RunningGateway, triton: FakeTriton) -> None:
    assert gateway.complete(model="sql").ok
    triton.models = ("zebra",)
    wait_for(lambda: "demo" not in gateway.upstreams.models, 60, "the new list of models")
    ids = ["zebra", "demo", "fr"]  # the latter are adapters
    wait_for(lambda: [card["id"] for card in gateway.get("/v1/models").json()["data"]] == ids, 60, "the new list")


def test_thousands_of_adapters(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.loras = {"demo": {f"adapter-{number}": f"/loras/{number}" for number in range(10_000)}}
    assert gateway.complete(model="adapter-9999").ok
    assert len(gateway.get("/v1/models").json()["data"]) == 10_002
    assert gateway.complete(model="adapter-10000").status_code == 404


def test_a_server_without_a_list_has_no_adapters(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.loras["demo"] = {"a": 1}  # type: ignore[dict-item]
    assert gateway.complete(model="a").status_code == 404
    assert gateway.complete(model="zebra/fr").ok


def test_what_the_server_refuses_passes_through(gateway: RunningGateway, triton: FakeTriton) -> None:
    def refuse(asked: Asked) -> Answer:
        yield response(asked.message, text_output="").__class__(
            error_message="[TW-INPUT] lora_name is sql: its rank is 512"
        )

    triton.answer = refuse
    answer = gateway.complete(model="sql")
    assert (answer.status_code, answer.json()["error"]["tag"]) == (400, "TW-INPUT")
    anthropic = gateway.post("messages", {"model": "sql", **BODIES["messages"]})
    assert anthropic.json()["error"]["type"] == "invalid_request_error"


def test_load_and_unload_as_in_vllm(gateway: RunningGateway, triton: FakeTriton) -> None:
    loaded = order(gateway, "load", model="demo", lora_name="new", lora_path="new")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert triton.loras["demo"]["new"] == "new"
    assert gateway.complete(model="new").ok
    again = order(gateway, "load", model="demo", lora_name="new", lora_path="other")
    assert (again.status_code, "load_inplace" in again.json()["error"]["message"]) == (400, True)
    assert order(gateway, "load", model="demo", lora_name="new", lora_path="other", load_inplace=True).ok
    assert triton.loras["demo"]["new"] == "other"
    unloaded = order(gateway, "unload", lora_name="new")
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert gateway.complete(model="new").status_code == 404
    assert order(gateway, "unload", lora_name="new").status_code == 404
    assert order(gateway, "unload", model="zebra", lora_name="fr", lora_int_id=3).ok
    assert list(triton.loras["zebra"]) == ["demo"]


@pytest.mark.parametrize(
    ("kind", "fields", "status", "param"),
    [
        ("load", {"model": "demo", "lora_path": "p"}, 400, "lora_name"),
        ("load", {"model": "demo", "lora_name": "a"}, 400, "lora_path"),
        ("load", {"model": "demo", "lora_name": "", "lora_path": "p"}, 400, "lora_name"),
        ("load", {"model": "demo", "lora_name": 5, "lora_path": "p"}, 400, "lora_name"),
        ("load", {"model": "demo", "lora_name": "a", "lora_path": ""}, 400, "lora_path"),
        ("load", {"model": "demo", "lora_name": "a", "lora_path": "../etc"}, 400, "lora_path"),
        ("load", {"lora_name": "a", "lora_path": "p"}, 404, None),  # which of two?
        ("load", {"model": "sql", "lora_name": "a", "lora_path": "p"}, 404, "model"),
        ("load", {"model": "demo", "lora_name": "a", "lora_path": "p", "lora_order": "list"}, 400, "lora_order"),
        ("unload", {}, 400, "lora_name"),
        ("unload", {"lora_name": "missing\n"}, 404, "lora_name"),
        ("unload", {"lora_name": "fr"}, 400, None),  # of which model?
    ],
)
def test_bad_orders_are_named(
    gateway: RunningGateway, triton: FakeTriton, kind: str, fields: Any, status: int, param: str | None
) -> None:
    triton.refused_path = "../etc"
    before = json.dumps(triton.loras)
    answer = order(gateway, kind, **fields)
    assert answer.status_code == status, answer.text
    if param:
        assert answer.json()["error"]["param"] == param
    assert json.dumps(triton.loras) == before


def test_loads_are_for_administrators(triton: FakeTriton, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("alice") + entry("root") + "admin = true\n")
    with gateway_to(triton.port, keys=keys) as gateway:
        fields = {"model": "demo", "lora_name": "new", "lora_path": "new"}
        for kind in ("load", "unload"):
            assert order(gateway, kind, **fields).status_code == 401
            refused = order(gateway, kind, {"Authorization": "Bearer alice"}, **fields)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        assert triton.lora_orders == []
        assert order(gateway, "load", {"Authorization": "Bearer root"}, **fields).ok
        assert gateway.complete(model="new", headers={"Authorization": "Bearer alice"}).ok


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", ["load", "list", "", 1])
def test_no_other_path_takes_orders(gateway: RunningGateway, triton: FakeTriton, path: str, value: object) -> None:
    body = {"model": "demo", **BODIES[path], "lora_order": value, "lora_name": "a", "lora_path": "p"}
    answer = gateway.post(path, body)
    assert (answer.status_code, "lora_order is set" in answer.text) == (400, True)
    assert (triton.asked, triton.lora_orders) == ([], [])


ORDER = '{"lora_order": "load", "lora_name": "a", "lora_path": "p"}'


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_order": "load"},
        {"lora_order\0x": "load"},
        {"parameters": {"lora_order": "load"}},
        {"sampling_parameters": ORDER},
        {"sampling_parameters": [[ORDER]]},
        {"sampling_parameters": ORDER.replace("o", "\\u006f")},
        {"parameters": {"sampling_parameters": [ORDER.replace("_", "\\u005F")]}},
    ],
)
def test_triton_s_own_path_takes_no_orders_either(triton: FakeTriton, fields: Any) -> None:
    with FakeHttpTriton() as http:
        address = Address.parse(f"127.0.0.1:{triton.port},http={http.url.rpartition(':')[2]}")
        with gateway_to(addresses=[address]) as gateway:
            answer = gateway.post("../v2/models/demo/generate", {"text_input": "", **fields})
            assert (answer.status_code, "lora_order is set" in answer.json()["error"]) == (400, True)
            named = {"text_input": "a", "sampling_parameters": '{"lora_name": "sql"}'}
            assert gateway.post("../v2/models/demo/generate", named).ok
    assert len(http.asked) == 1


def test_orders_go_to_all_servers(both: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]) -> None:
    fields = {"model": "demo", "lora_name": "new", "lora_path": "p"}
    tritons[1].refused_path = "p"
    failed = order(both, "load", **fields)
    assert (failed.status_code, failed.json()["error"]["message"]) == (400, "lora_path is outside of lora_dir")
    assert [list(one.loras["demo"]) for one in tritons] == [["new"], []]
    tritons[1].refused_path = ""
    assert order(both, "load", **fields).ok, "it is not loaded everywhere"
    assert order(both, "load", **fields).status_code == 400
    assert [list(one.loras["demo"]) for one in tritons] == [["new"], ["new"]]
    assert order(both, "unload", lora_name="new").ok
    assert [list(one.loras["demo"]) for one in tritons] == [[], []]
    assert order(both, "load", **fields).ok
    for one in tritons:
        one.loras["demo"].clear()  # by another worker
    assert order(both, "unload", lora_name="new").status_code == 404
    tritons[0].loras["demo"]["new"] = "p"
    assert order(both, "unload", lora_name="new").ok, "the other server does not have it"


@pytest.mark.parametrize("fields", [{"model": "sql"}, {"lora_name": "sql"}])
def test_requests_go_where_the_adapter_is(
    both: RunningGateway, tritons: tuple[FakeTriton, FakeTriton], fields: Any
) -> None:
    tritons[1].loras = {"demo": {"sql": "/loras/sql"}}
    assert both.get("/v1/models").ok
    assert all(both.complete(f"prompt {number}", **fields).ok for number in range(8))
    assert [len(one.asked) for one in tritons] == [0, 8]

    def refuse(asked: Asked) -> Answer:
        yield response(asked.message).__class__(error_message="[TW-BUSY retry_after_ms=10] full")

    tritons[1].answer = refuse
    assert both.complete(**fields).status_code == 429, "no other server has it"
    assert tritons[0].asked == []


def test_an_adapter_s_requests_gather(both: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]) -> None:
    for triton in tritons:
        triton.loras = {"demo": {name: f"/{name}" for name in ("a", "b")}}
    for number in range(6):
        assert all(both.complete(f"another prompt {number}", model=name).ok for name in ("a", "b"))
    homes = [{asked.sampling["lora_name"] for asked in triton.asked} for triton in tritons]
    assert homes in ([{"a"}, {"b"}], [{"b"}, {"a"}], [{"a", "b"}, set()], [set(), {"a", "b"}])


def test_adapters_share_no_chunks() -> None:
    def route(**params: object) -> tuple[int, ...]:
        return route_request(UpstreamRequest(prompts=[{"text_input": "word " * 1000}], params=params)).chunks

    plain, one, other = route(), route(lora_name="a"), route(lora_name="b")
    assert len(one) == len(plain) + 1
    assert not set(plain) & set(one)
    assert not set(one) & set(other)
    assert one == route(lora_name="a")
    assert route(lora_name=5) == plain, "the server refuses it"
    short = UpstreamRequest(prompts=[{"text_input": "a"}], params={"lora_name": "x" * 5000})
    assert len(route_request(short).chunks) == 1
    assert route_request(short).num_tokens == CHUNK_TOKENS
