"""`/v1/embeddings` in OpenAI's shapes."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from support.gateway.running_gateway import RunningGateway, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton

VECTOR = [0.0, 0.6, 0.8]


@pytest.fixture
def embedding(triton: FakeTriton) -> Iterator[None]:
    def answer(asked: Asked) -> Answer:
        yield from say(asked, text_output="", embedding=("FP32", "f", VECTOR))

    triton.answer = answer
    yield


def embed(gateway: RunningGateway, **body: Any) -> Any:
    return gateway.post("embeddings", {"model": "demo", **body})


@pytest.mark.usefixtures("embedding")
def test_floats(gateway: RunningGateway, triton: FakeTriton) -> None:
    answer = embed(gateway, input=["one", "two"], truncate_prompt_tokens=5).json()
    assert answer["object"] == "list"
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    assert answer["data"][1]["embedding"] == pytest.approx(VECTOR)
    assert (answer["model"], answer["usage"]) == ("demo", {"prompt_tokens": 14, "total_tokens": 14})
    assert {asked.inputs["text_input"] for asked in triton.asked} == {"one", "two"}
    assert all(asked.inputs["task"] == "embed" for asked in triton.asked)
    assert triton.asked[0].sampling == {"truncate_prompt_tokens": 5}


@pytest.mark.usefixtures("embedding")
def test_base64_and_fewer_dimensions(gateway: RunningGateway) -> None:
    (one,) = embed(gateway, input=[1, 2], encoding_format="base64", dimensions=2).json()["data"]
    assert struct.unpack("<2f", base64.b64decode(one["embedding"])) == (0.0, 1.0)


@pytest.mark.usefixtures("embedding")
def test_more_inputs_than_are_asked_at_once(gateway: RunningGateway, triton: FakeTriton) -> None:
    answer = embed(gateway, input=[[number] for number in range(200)]).json()
    assert [one["index"] for one in answer["data"]] == list(range(200))
    assert len(triton.asked) == 200


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "input is missing: it is required", "input"),
        ({"input": []}, "input has 0 entries: it must have 1 to 2048", "input"),
        ({"input": ["x"] * 2049}, "input has 2049 entries", "input"),
        ({"input": ["x", 5]}, "input mixes texts", "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format: Invalid enum value", "encoding_format"),
        ({"input": "x", "dimensions": 4}, "dimensions is 4: the model's embeddings have 3", "dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions is 0", "dimensions"),
    ],
)
@pytest.mark.usefixtures("embedding")
def test_refusals(gateway: RunningGateway, body: dict[str, Any], message: str, param: str | None) -> None:
    answer = embed(gateway, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert message in error["message"]
    assert error["param"] == param
