"""Dynamo's `nvext.agent_hints`."""

from __future__ import annotations

from typing import Any

import pytest

from support.gateway.running_gateway import RunningGateway, say
from support.triton.grpc_triton import FakeTriton

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "one two"}]},
    "completions": {"prompt": "one two"},
    "responses": {"input": "one two"},
    "messages": {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 9},
}


def ask(gateway: RunningGateway, path: str = "chat/completions", **fields: Any) -> Any:
    return gateway.post(path, {"model": "demo", **BODIES[path], **fields})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("hint", "asked"), [(5, 2), (1, 2), (0, None), (-3, 4)])
def test_a_priority_becomes_a_class(
    gateway: RunningGateway, triton: FakeTriton, path: str, hint: int, asked: int | None
) -> None:
    triton.answer = say
    hints = {"priority": hint, "osl": 512, "speculative_prefill": False}
    ask(gateway, path, nvext={"agent_hints": hints}).raise_for_status()
    assert triton.asked[0].sampling.get("priority") == asked
    assert not {"nvext", "osl"} & triton.asked[0].sampling.keys()


def test_a_field_wins_over_a_hint(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = say
    ask(gateway, priority="critical", nvext={"agent_hints": {"priority": -1}}).raise_for_status()
    assert triton.asked[0].sampling["priority"] == 1


@pytest.mark.parametrize(
    ("extensions", "words"),
    [
        ({"agent_hints": {"speculative_prefill": True}}, ["speculative_prefill is set", "send false"]),
        ({"agent_hints": {"strict_priority": 1}}, ["nvext.agent_hints", "strict_priority"]),
        ({"agent_hints": {"latency_sensitivity": 1.0}}, ["nvext.agent_hints", "latency_sensitivity"]),
        ({"agent_hints": {"priority": "high"}}, ["nvext.agent_hints.priority", "int"]),
        ({"annotations": ["timing"]}, ["nvext", "annotations"]),
    ],
    ids=str,
)
def test_other_extensions_are_refused_by_name(
    gateway: RunningGateway, triton: FakeTriton, extensions: dict[str, Any], words: list[str]
) -> None:
    answer = ask(gateway, nvext=extensions)
    assert answer.status_code == 400
    assert all(word in answer.json()["error"]["message"] for word in words), answer.text
    assert not triton.asked
