"""Encoders behind the gateway: `/v1/embeddings`, `/v1/rerank` and `/v1/score`."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from support.gateway.running_gateway import RunningGateway, entry, gateway_to
from support.triton.grpc_triton import Answer, Asked, FakeTriton, Refused, parameters, response, running
from tidewheel.gateway import encoders
from tidewheel_client.errors import PromptTooLarge

MODELS = ("classifier", "demo", "embedder", "reranker")
PAIRS = {"query": "red", "documents": ["a", "bcd", "ef"]}


def encode(asked: Asked) -> Answer:
    """Answer with three values by the text's length, or the pair's score: a hundredth of it."""
    text = asked.inputs["text"]
    is_pair = "query" in asked.inputs
    values = [len(text) / 100] if is_pair else [0.0, 0.6, float(len(text))]
    outputs = {"score" if is_pair else "embedding": ("FP32", "f", values)}
    yield response(asked.message, **outputs, num_input_tokens=("INT32", "i", [len(text) + 2]))


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeTriton, RunningGateway]]:
    with running(FakeTriton(models=MODELS)) as fake, gateway_to(fake.port) as gateway:
        yield fake, gateway


@pytest.fixture(autouse=True)
def _encoding(triton: FakeTriton) -> None:
    triton.answer = encode


def test_each_text_is_a_request_with_the_same_service(gateway: RunningGateway, triton: FakeTriton) -> None:
    service = {"priority": 2, "deadline_ms": 5000, "tenant": "t"}
    headers, body = {"X-Request-Id": "me"}, {"model": "embedder", "input": ["one", "three"], "user": "u"}
    found = gateway.post("embeddings", {**body, **service}, headers=headers)
    answer = found.json()
    assert found.headers["x-request-id"] == "me"
    assert [one["embedding"] for one in answer["data"]] == [pytest.approx([0, 0.6, 3]), pytest.approx([0, 0.6, 5])]
    assert (answer["model"], answer["usage"]) == ("embedder", {"prompt_tokens": 12, "total_tokens": 12})
    assert {asked.inputs["text"]: asked.message.id for asked in triton.asked} == {"one": "me-0", "three": "me-1"}
    assert parameters(triton.asked[0]) == {"qos_class": "2", "deadline_ms": "5000", "tenant": "t"}


def test_base64_and_fewer_dimensions(gateway: RunningGateway) -> None:
    body = {"model": "embedder", "input": "x", "encoding_format": "base64", "dimensions": 2}
    (one,) = gateway.post("embeddings", body).json()["data"]
    assert struct.unpack("<2f", base64.b64decode(one["embedding"])) == (0.0, 1.0)


def test_documents_are_sorted_by_relevance(gateway: RunningGateway, triton: FakeTriton) -> None:
    answer = gateway.post("rerank", {**PAIRS, "top_n": 2}).json()
    best, second = answer["results"]
    assert best == {"index": 1, "relevance_score": pytest.approx(0.03), "document": {"text": "bcd"}}
    assert second["index"] == 2
    assert (answer["model"], answer["usage"]) == ("reranker", {"prompt_tokens": 12, "total_tokens": 12})
    assert {(asked.inputs["query"], asked.inputs["text"]) for asked in triton.asked} == {
        ("red", "a"), ("red", "bcd"), ("red", "ef"),
    }  # fmt: skip
    whole = gateway.post("rerank", {**PAIRS, "return_documents": False}).json()
    assert [one["index"] for one in whole["results"]] == [1, 2, 0]
    assert "document" not in whole["results"][0]


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("q", "d", [("q", "d")]),
        ("q", ["d", "ee"], [("q", "d"), ("q", "ee")]),
        (["q", "r"], ["d", "ee"], [("q", "d"), ("r", "ee")]),
    ],
)
def test_scores_of_pairs(
    gateway: RunningGateway, triton: FakeTriton, first: Any, second: Any, pairs: list[tuple[str, str]]
) -> None:
    answer = gateway.post("score", {"model": "reranker", "text_1": first, "text_2": second}).json()
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "score") for i in range(len(pairs))]
    assert [one["score"] for one in answer["data"]] == pytest.approx([len(text) / 100 for _, text in pairs])
    assert sorted((asked.inputs["query"], asked.inputs["text"]) for asked in triton.asked) == pairs


@pytest.mark.parametrize(
    ("path", "body", "status", "words", "param"),
    [
        ("embeddings", {"model": "embedder", "input": [1, 2]}, 400, ["input are token ids", "takes texts"], "input"),
        ("embeddings", {"model": "embedder", "input": "x", "top_k": 1}, 400, ["top_k is set"], "top_k"),
        ("embeddings", {"model": "reranker", "input": "x"}, 404, ["demo, embedder", "generate or embed"], "model"),
        ("chat/completions", {"model": "embedder", "messages": []}, 404, ["served is demo", "generate"], "model"),
        ("rerank", {**PAIRS, "model": "embedder"}, 404, ["served is reranker", "rerank"], "model"),
        ("rerank", {**PAIRS, "model": "classifier"}, 404, ["served is reranker"], "model"),
        ("rerank", {"query": "q"}, 400, ["documents is missing"], "documents"),
        ("rerank", {"query": "q", "documents": []}, 400, ["documents has 0", "1 to 2048"], "documents"),
        ("rerank", {"query": "q", "documents": ["d"] * 2049}, 400, ["documents has 2049", "2048"], "documents"),
        ("rerank", {**PAIRS, "top_n": 0}, 400, ["top_n", ">= 1"], "top_n"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, ["text_1 has 2", "text_2 1"], "text_1"),
        ("score", {"text_1": "a" * 9000, "text_2": ["c"] * 2000}, 400, ["18002000", "16777216"], "text_2"),
    ],
)
def test_refusals(
    gateway: RunningGateway, path: str, body: dict[str, Any], status: int, words: list[str], param: str
) -> None:
    answer = gateway.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert all(word in error["message"] for word in words), error


def test_errors_of_the_backend_name_the_client_s_field(gateway: RunningGateway, triton: FakeTriton) -> None:
    def refuse(asked: Asked) -> Answer:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "[TW-INPUT] qos_class is 9: it must be 0 to 4")
        yield

    triton.answer = refuse
    answer = gateway.post("rerank", {**PAIRS, "priority": 9})
    error = answer.json()["error"]
    assert (answer.status_code, error["tag"], error["param"]) == (400, "TW-INPUT", "priority")
    assert "priority is 9" in error["message"]


def test_a_lost_server_is_replaced_by_another(triton: FakeTriton) -> None:
    with running(FakeTriton(models=("reranker",))) as other, gateway_to(triton.port, other.port) as gateway:
        other.answer = encode

        def refuse(asked: Asked) -> Answer:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            yield

        triton.answer = refuse
        assert len(gateway.post("rerank", PAIRS).json()["results"]) == 3
        assert len(other.asked) == 3


def test_a_key_sets_tenant_and_class(triton: FakeTriton, tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("secret", max_priority=3))
    headers = {"Authorization": "Bearer secret"}
    with gateway_to(triton.port, keys=keys) as gateway:
        assert gateway.post("rerank", {**PAIRS, "priority": 1}, headers=headers).ok
        assert parameters(triton.asked[0]) == {"qos_class": "3", "tenant": "secret"}
        answer = gateway.post("rerank", {**PAIRS, "qos_class": 1}, headers=headers)
        assert answer.json()["error"]["param"] == "qos_class"


def test_models_say_what_they_do(gateway: RunningGateway) -> None:
    models = {one["id"]: one["task"] for one in gateway.get("/v1/models").json()["data"]}
    assert models == {"demo": "generate", "embedder": "embed", "reranker": "rerank"}


def test_pairs_are_limited_before_they_are_made() -> None:
    body = {"query": "q" * (encoders.MAX_PAIR_CHARS // 2), "documents": ["", "d"]}
    with pytest.raises(PromptTooLarge):
        encoders.read_rerank(body)
