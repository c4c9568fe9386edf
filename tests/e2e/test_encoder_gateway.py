"""Encoders behind the real server's gateway: values of transformers, and true numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import requests
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from support.one_shot.encoder_folder import save
from support.triton.serving import Server, start_server, stop_server, wait_ready

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TEXTS = ["red cat", "green dog blue cat red", "dog " * 40]  # the last one is cut
CONFIG = """backend: "tidewheel"
parameters {{ key: "adapter" value: {{ string_value: "encoder" }} }}
parameters {{ key: "model" value: {{ string_value: "{}" }} }}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a random encoder and of a random cross-encoder, which has one label."""
    root = tmp_path_factory.mktemp("weights")
    return {name: save(root / name, labels) for name, labels in (("embedder", 0), ("reranker", 1))}


@pytest.fixture(scope="module")
def served(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    for name, folder in folders.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(CONFIG.format(folder))
    log = repository.parent / "encoders.log"
    running = wait_ready(start_server("--model-repository", str(repository), log=log, with_gateway=True))
    yield running
    assert stop_server(running) == 0, log.read_text()


def tokenized(folder: Path, *texts: list[str]) -> Any:
    return AutoTokenizer.from_pretrained(folder)(
        *texts, padding=True, truncation=True, max_length=16, return_tensors="pt"
    )


def post(server: Server, path: str, body: dict[str, Any]) -> requests.Response:
    return server.session.post(f"{server.openai}/v1/{path}", json=body, timeout=60)


def test_embeddings_through_openai_s_client(served: Server, folders: dict[str, Path]) -> None:
    tokens = tokenized(folders["embedder"], TEXTS)
    with torch.no_grad():
        states = AutoModel.from_pretrained(folders["embedder"])(**tokens).last_hidden_state
    mask = tokens["attention_mask"][:, :, None]
    wanted = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()
    with openai.OpenAI(base_url=f"{served.openai}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="embedder", input=TEXTS, extra_body={"priority": 1})
    np.testing.assert_allclose([one.embedding for one in answer.data], wanted, rtol=1e-4, atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == int(tokens["attention_mask"].sum())


def test_documents_are_ranked_and_pairs_scored(served: Server, folders: dict[str, Path]) -> None:
    tokens = tokenized(folders["reranker"], ["red dog"] * len(TEXTS), TEXTS)
    with torch.no_grad():
        logits = AutoModelForSequenceClassification.from_pretrained(folders["reranker"])(**tokens).logits
    wanted = logits[:, 0].sigmoid().numpy()
    usage = {
        "prompt_tokens": int(tokens["attention_mask"].sum()),
        "total_tokens": int(tokens["attention_mask"].sum()),
    }
    ranked = post(served, "rerank", {"query": "red dog", "documents": TEXTS, "deadline_ms": 60_000}).json()
    assert [one["index"] for one in ranked["results"]] == np.argsort(-wanted).tolist()
    scored = post(served, "score", {"model": "reranker", "text_1": "red dog", "text_2": TEXTS}).json()
    np.testing.assert_allclose([one["score"] for one in scored["data"]], wanted, rtol=1e-4, atol=1e-5)
    assert ranked["usage"] == scored["usage"] == usage


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("rerank", {"query": "red", "documents": ["cat"], "priority": 9}, 400, "priority"),
        ("rerank", {"query": "red", "documents": ["cat"], "deadline_ms": 1e-9}, 504, None),
        ("chat/completions", {"model": "reranker", "messages": []}, 404, "model"),
    ],
)
def test_refusals_name_the_field(
    served: Server, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = post(served, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
