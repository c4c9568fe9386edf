"""Whatever a body holds, its client gets an answer of its API's shape, and no error of the gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.gateway.running_gateway import RunningGateway, say
from support.triton.grpc_triton import FakeTriton
from tidewheel.gateway.bodies import ChatBody, CompletionBody
from tidewheel.gateway.messages import MessagesBody
from tidewheel.gateway.responses import ResponsesBody

# Fields that a body of a path has: most of them are right.
PATHS = {
    "chat/completions": ("messages",),
    "completions": ("prompt",),
    "embeddings": ("input",),
    "messages": ("messages",),
    "messages/count_tokens": ("messages",),
    "responses": ("input",),
    "../tokenize": ("prompt", "messages"),
    "../detokenize": ("tokens",),
}
OTHERS = ("stop", "close_session", "input", "dimensions", "encoding_format", "tokens", "return_token_strs", "ü")
BODIES = (ChatBody, CompletionBody, MessagesBody, ResponsesBody)
FIELDS = sorted({*OTHERS, *(name for body in BODIES for name in body.__struct_fields__)})
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": values}), min_size=1, max_size=2)
prompts = values | st.just("x")
usual = st.fixed_dictionaries(
    {
        "model": st.just("demo"),
        "prompt": prompts,
        "messages": messages,
        "input": prompts,
        "tokens": values | st.just([5]),
    }
)
bodies = st.builds(dict.__or__, usual, st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
quickly = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def check(gateway: RunningGateway, path: str, body: Any) -> None:
    answer = gateway.post(path, body)
    assert answer.status_code in (200, 400, 404), (answer.text, body)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@quickly
@given(body=bodies, path=st.sampled_from(sorted(PATHS)), is_second=st.booleans())
def test_any_fields(
    gateway: RunningGateway, triton: FakeTriton, body: dict[str, Any], path: str, is_second: bool
) -> None:
    triton.answer = lambda asked: say(asked, text_output='{"count": 1}', embedding=("FP32", "f", [0.6, 0.8]))
    own = PATHS[path][-1 if is_second else 0]
    others = {"prompt", "messages", "input", "tokens"} - {own}
    check(gateway, path, {name: value for name, value in body.items() if name not in others})


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens", "responses"])
def test_nesting(gateway: RunningGateway, triton: FakeTriton, path: str) -> None:
    triton.answer = say
    turns = [{"role": "user", "content": "x"}]
    begun = json.dumps({"model": "demo", PATHS[path][0]: turns})[:-1].encode() + b', "other": '
    for depth in (*range(900, 1000, 2), 512):
        answer = gateway.post(path, begun + b"[" * depth + b"]" * depth + b"}")
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the body is nested too deep")


@quickly
@given(data=st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(gateway: RunningGateway, triton: FakeTriton, data: bytes) -> None:
    triton.answer = say
    check(gateway, "completions", data)
