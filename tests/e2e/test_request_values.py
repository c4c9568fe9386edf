"""Requests as clients of Triton's vLLM backend send them: defaults, limits, names, and clients that hang up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.triton.serving import Server, grpc_inputs, grpc_stream, serving_demo

pytestmark = pytest.mark.e2e

CONFIG = """
backend: "tidewheel"
parameters { key: "model" value { string_value: "weights" } }
parameters { key: "kv_cache_memory_mb" value { string_value: "64" } }
parameters { key: "default_max_tokens" value { string_value: "context" } }
"""
TWIN = """
backend: "tidewheel"
model_transaction_policy { decoupled: false }
parameters { key: "engine_of" value { string_value: "demo" } }
parameters { key: "default_max_tokens" value { string_value: "3" } }
"""
CONTEXT = 1024
LONG_PROMPT = list(range(100, 1100))
FIGURES: dict[str, Any] = {"ignore_eos": True, "return_num_output_tokens": True, "return_finish_reason": True}


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model under other settings of its front ends."""
    folder = tmp_path_factory.mktemp("bounded")
    (folder / "demo_infer" / "1").mkdir(parents=True)
    (folder / "demo_infer" / "config.pbtxt").write_text(TWIN)
    with serving_demo(folder, CONFIG) as server:
        yield server


def ask(server: Server, model: str = "demo", **body: Any) -> dict[str, Any]:
    response = server.post(f"{model}/generate", {**FIGURES, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def length(answer: dict[str, Any]) -> int:
    assert answer["finish_reason"] == "length"
    return int(answer["num_output_tokens"])


# --- max_tokens ---------------------------------------------------------------------------------------------------


def test_sixteen_tokens_by_default(server: Server) -> None:
    assert length(ask(server, text_input="A tuple is")) == 16
    assert length(ask(server, "demo_infer", text_input="A tuple is")) == 16
    results = grpc_stream(server, grpc_inputs("A tuple is", stream=True, **FIGURES))
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == 16


def test_each_entry_has_its_default(bounded: Server) -> None:
    assert length(ask(bounded, input_ids=LONG_PROMPT)) == CONTEXT - len(LONG_PROMPT)
    assert length(ask(bounded, "demo_infer", input_ids=LONG_PROMPT)) == 3
    assert length(ask(bounded, "demo_infer", input_ids=LONG_PROMPT, max_tokens=5)) == 5


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "max_completion_tokens"])
def test_max_tokens_beyond_the_context_is_cut(server: Server, name: str) -> None:
    assert length(ask(server, input_ids=LONG_PROMPT, **{name: 2000})) == CONTEXT - len(LONG_PROMPT)


def test_a_prompt_beyond_the_context_is_refused(server: Server) -> None:
    response = server.post("demo/generate", {"input_ids": [5] * CONTEXT})
    assert response.status_code == 400
    assert "[TW-TOO-LARGE]" in response.text
