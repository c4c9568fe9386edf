"""`/v1/images/generations`: OpenAI's forms, and what a server is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import requests

from support.gateway.running_gateway import RunningGateway, entry, gateway_to
from support.triton.grpc_triton import Answer, Asked, FakeTriton, Refused, paint, parameters, response, running


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeTriton, RunningGateway]]:
    with running(FakeTriton(models=("demo", "painter"))) as fake, gateway_to(fake.port) as gateway:
        yield fake, gateway


@pytest.fixture(autouse=True)
def _painting(triton: FakeTriton) -> None:
    triton.answer = paint


def ask(gateway: RunningGateway, **body: Any) -> requests.Response:
    return gateway.post("images/generations", {"label": 7, **body})


def events(answer: requests.Response) -> list[dict[str, Any]]:
    """Return the data of the events, each of which has its type as name."""
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    parts = [part.split("\n") for part in answer.text.removesuffix("\n\n").split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {one['type']}" for one in found]
    return found


def test_each_picture_is_a_request_with_a_seed_of_its_own(gateway: RunningGateway, triton: FakeTriton) -> None:
    service = {"priority": 2, "deadline_ms": 5000, "tenant": "t", "guidance_scale": 2.5, "steps": 4}
    triton.answer = lambda asked: paint(asked, 10, 20)
    openai_s = {"user": "u", "response_format": "b64_json", "quality": "auto", "size": "16x8"}
    headers = {"X-Request-Id": "me"}
    answer = gateway.post(
        "images/generations", {"label": 7, "n": 2, "seed": 5, **service, **openai_s}, headers=headers
    )
    content = {"b64_json": "PNG 20", "step": 20, "steps": 20}
    assert answer.json()["data"] == [content, content]
    assert answer.json()["usage"]["output_tokens"] == 40
    asked = {one.message.id: one for one in triton.asked}
    assert asked.keys() == {"me-0", "me-1"}
    assert asked["me-0"].inputs == {"label": [7]}
    alike = {"qos_class": "2", "deadline_ms": "5000", "tenant": "t", "guidance_scale": "2.5", "steps": "4"}
    alike |= {"size": "16x8", "format": "png_base64"}
    assert parameters(asked["me-0"]) == {**alike, "seed": "5"} and parameters(asked["me-1"]) == {**alike, "seed": "6"}


def test_previews_are_events_and_the_picture_is_the_last(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: paint(asked, 5, 10, 20)
    *previews, last = events(ask(gateway, stream=True, partial_images=3))
    assert [(one["partial_image_index"], one["step"], one["b64_json"]) for one in previews] == [
        (0, 5, "PNG 5"), (1, 10, "PNG 10"),
    ]  # fmt: skip
    assert {one["type"] for one in previews} == {"image_generation.partial_image"}
    assert (last["type"], last["b64_json"], last["size"]) == ("image_generation.completed", "PNG 20", "auto")
    assert last["usage"]["total_tokens"] == 20
    assert parameters(triton.asked[0])["partial_images"] == "3"


def test_openai_s_client(gateway: RunningGateway, triton: FakeTriton) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.images.generate(prompt="a red cat", model="painter", size="1024x1024")
        assert whole.data is not None and [one.b64_json for one in whole.data] == ["PNG 20"]
        assert triton.asked[0].inputs == {"prompt": "a red cat"}
        triton.answer = lambda asked: paint(asked, 9, 20)
        stream = client.images.generate(
            prompt="", model="painter", stream=True, partial_images=1, extra_body={"label": 3}
        )
        first, last = stream
    assert first.type == "image_generation.partial_image" and first.partial_image_index == 0
    assert last.type == "image_generation.completed" and last.usage.output_tokens == 20
    assert triton.asked[1].inputs == {"label": [3]}


def test_a_picture_at_its_deadline_is_the_last(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: paint(asked, 12, reason="deadline")
    [content] = ask(gateway, on_deadline="preview", deadline_ms=50).json()["data"]
    assert (content["step"], content["steps"]) == (12, 20)
    [last] = events(ask(gateway, stream=True))
    assert last["type"] == "image_generation.completed" and last["step"] == 12


@pytest.mark.parametrize(
    ("body", "status", "words", "param"),
    [
        ({"response_format": "url"}, 400, ["pictures are not stored: send b64_json"], "response_format"),
        ({"output_format": "webp"}, 400, ["output_format is set", "send png"], "output_format"),
        ({"quality": ["hd"]}, 400, ["quality is set: send auto"], "quality"),
        ({"n": 0}, 400, ["n: ", ">= 1"], "n"),
        ({"n": 11}, 400, ["n: ", "<= 10"], "n"),
        ({"n": 2, "stream": True}, 400, ["n is 2", "a stream has one picture"], "n"),
        ({"stream": 2}, 400, ["stream: Expected `bool"], "stream"),
        ({"label": 2**31}, 400, ["label must be a number, an int32"], "label"),
        ({"label": "seven"}, 400, ["label: Expected `int"], "label"),
        ({"seed": "x"}, 400, ["seed: Expected `int"], "seed"),
        ({"model": "demo"}, 404, ["'demo'", "served is painter that can draw"], "model"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(
    gateway: RunningGateway, triton: FakeTriton, body: dict[str, Any], status: int, words: list[str], param: str
) -> None:
    answer = ask(gateway, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert all(word in error["message"] for word in words) and "\n" not in error["message"], error
    assert triton.asked == []


def test_a_model_of_pictures_does_not_chat(gateway: RunningGateway) -> None:
    error = gateway.post("chat/completions", {"model": "painter", "messages": []}).json()["error"]
    assert "served is demo that can generate" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_backend_refuses_is_told_before_any_picture(
    gateway: RunningGateway, triton: FakeTriton, stream: bool
) -> None:
    def refuse(asked: Asked) -> Answer:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "[TW-INPUT] steps is 0: it must be 1 to 100 (max_steps)")
        yield

    triton.answer = refuse
    answer = ask(gateway, steps=0, stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["tag"], error["param"]) == (400, "TW-INPUT", "steps")
    assert error["message"] == "steps is 0: it must be 1 to 100 (max_steps)"


def test_a_failure_behind_a_preview_is_an_event(gateway: RunningGateway, triton: FakeTriton) -> None:
    def break_off(asked: Asked) -> Answer:
        yield next(iter(paint(asked, 5, 20)))
        answer = response(asked.message)
        answer.error_message = "[TW-NUMERIC] step 6 is not finite"
        yield answer

    triton.answer = break_off
    first, last = ask(gateway, stream=True).text.strip().split("\n\n")
    assert "partial_image" in first
    assert json.loads(last.removeprefix("data: "))["error"]["tag"] == "TW-NUMERIC"


def test_a_client_that_hangs_up_ends_the_request(gateway: RunningGateway, triton: FakeTriton) -> None:
    def go_on(asked: Asked) -> Answer:
        yield next(iter(paint(asked, 5, 20)))
        triton.ended.wait(30)

    triton.answer = go_on
    body = {"label": 7, "stream": True, "partial_images": 3}
    with requests.post(f"{gateway.url}/v1/images/generations", json=body, stream=True, timeout=30) as answer:
        assert next(answer.iter_lines()) == b"event: image_generation.partial_image"
    assert triton.ended.wait(20)


def test_a_lost_server_is_replaced_by_another(triton: FakeTriton) -> None:
    with running(FakeTriton(models=("painter",))) as other, gateway_to(triton.port, other.port) as gateway:
        other.answer = paint

        def refuse(asked: Asked) -> Answer:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            yield

        triton.answer = refuse
        assert len(ask(gateway, n=3, deadline_ms=60_000).json()["data"]) == 3
        assert len(other.asked) == 3 and int(parameters(other.asked[0])["deadline_ms"]) <= 60_000


def test_a_key_sets_tenant_and_class(triton: FakeTriton, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("secret", max_priority=3))
    with gateway_to(triton.port, keys=keys) as gateway:
        assert ask(gateway).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert gateway.post("images/generations", {"label": 7, "priority": 1}, headers=headers).ok
        assert parameters(triton.asked[0]) == {"qos_class": "3", "tenant": "secret", "format": "png_base64"}
        refused = gateway.post("images/generations", {"label": 7, "tenant": "x"}, headers=headers)
        assert refused.json()["error"]["param"] == "tenant"


def test_models_say_what_they_do(gateway: RunningGateway) -> None:
    models = {one["id"]: one["task"] for one in gateway.get("/v1/models").json()["data"]}
    assert models == {"demo": "generate", "painter": "draw"}
