"""Whatever a body holds, its client gets an answer of OpenAI's shape, and no error of the gateway."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.gateway.running_gateway import RunningGateway, say
from support.triton.grpc_triton import FakeTriton
from tidewheel.gateway.bodies import ChatBody, CompletionBody

FIELDS = sorted(
    {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, "echo", "stop", "close_session", "ü"}
)
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
usual = st.fixed_dictionaries({"model": st.just("demo"), "prompt": values | st.just("x"), "messages": messages})
bodies = st.builds(dict.__or__, usual, st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
quickly = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def check(gateway: RunningGateway, path: str, body: Any) -> None:
    answer = gateway.post(path, body)
    assert answer.status_code in (200, 400, 404), (answer.text, body)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@quickly
@given(body=bodies, is_chat=st.booleans())
def test_any_fields(gateway: RunningGateway, triton: FakeTriton, body: dict[str, Any], is_chat: bool) -> None:
    triton.answer = say
    fields = {name: value for name, value in body.items() if name != ("prompt" if is_chat else "messages")}
    check(gateway, "chat/completions" if is_chat else "completions", fields)


@quickly
@given(data=st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(gateway: RunningGateway, triton: FakeTriton, data: bytes) -> None:
    triton.answer = say
    check(gateway, "completions", data)
