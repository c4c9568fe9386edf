"""`/tokenize` and `/detokenize`: what the backend is asked, and its answer in vLLM's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from support.gateway.running_gateway import RunningGateway, say
from support.triton.grpc_triton import FakeTriton

FOUND = {"count": 1, "max_model_len": 8, "tokens": [5], "token_strs": None}
CHAT = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def ask(gateway: RunningGateway, path: str, **body: Any) -> requests.Response:
    return gateway.session.post(f"{gateway.url}/{path}", json=body, timeout=30)


@pytest.mark.parametrize(
    ("body", "tensor", "value", "sampling"),
    [
        ({"prompt": "x"}, "text_input", "x", {}),
        (
            {"model": "demo", "prompt": "", "add_special_tokens": False, "return_token_strs": True},
            "text_input",
            "",
            {"add_special_tokens": False, "return_token_strs": True},
        ),
        ({"messages": CHAT, "add_generation_prompt": False}, "messages", CHAT, {"add_generation_prompt": False}),
        ({"messages": CHAT, "tools": TOOLS}, "messages", {"messages": CHAT, "tools": TOOLS}, {}),
    ],
)
def test_tokenize(
    gateway: RunningGateway, triton: FakeTriton, body: Any, tensor: str, value: Any, sampling: dict[str, Any]
) -> None:
    triton.answer = lambda asked: say(asked, text_output=json.dumps(FOUND))
    assert ask(gateway, "tokenize", **{"model": "demo", **body}).json() == FOUND
    inputs = triton.asked[0].inputs
    assert inputs["task"] == "tokenize"
    assert (json.loads(inputs[tensor]) if tensor == "messages" else inputs[tensor]) == value
    assert triton.asked[0].sampling == sampling


def test_detokenize(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output='é "x"')
    assert ask(gateway, "detokenize", model="demo", tokens=[5, 6]).json() == {"prompt": 'é "x"'}
    assert (triton.asked[0].inputs["task"], triton.asked[0].inputs["input_ids"]) == ("detokenize", [5, 6])
    assert ask(gateway, "detokenize", model="demo", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("tokenize", {}, "prompt or messages", None),
        ("tokenize", {"prompt": "x", "messages": CHAT}, "prompt or messages", "prompt"),
        ("tokenize", {"prompt": 5}, "prompt: Expected `str", "prompt"),
        ("tokenize", {"prompt": "x", "tools": TOOLS}, "tools and chat_template_kwargs", "tools"),
        ("detokenize", {}, "tokens is missing: it is required", "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens[0]: Expected `int`", "tokens[0]"),
        ("detokenize", {"tokens": [2**40]}, "tokens must be a sequence of int32", "tokens"),
    ],
)
def test_refusals(gateway: RunningGateway, path: str, body: dict[str, Any], message: str, param: str | None) -> None:
    answer = ask(gateway, path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert message in error["message"]
    assert error["param"] == param
