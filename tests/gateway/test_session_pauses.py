"""What the server of a session hears of the tools that an answer calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from support.gateway.running_gateway import RunningGateway, gateway_to, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, Refused, running
from support.triton.serving import wait_for

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
OTHER_CALL = CALL.replace("weather", "time")
UNKNOWN_CALL = CALL.replace("weather", "rm")
FUNCTIONS: list[dict[str, Any]] = [{"name": name, "parameters": {"type": "object"}} for name in ("weather", "time")]
CHAT_TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
MESSAGES = [{"role": "user", "content": "one two"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES, "tools": CHAT_TOOLS},
    "responses": {"input": "one two", "tools": [{"type": "function", **function} for function in FUNCTIONS]},
    "messages": {
        "messages": MESSAGES,
        "max_tokens": 9,
        "tools": [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS],
    },
}


def answered(text: str, **outputs: Any) -> Any:
    """Return an answer of `text` to a prompt, and an empty one to an order about a session."""
    return lambda asked: say(asked, text_output="" if "pause_session" in asked.sampling else text, **outputs)


def pauses(triton: FakeTriton) -> list[dict[str, Any]]:
    return [asked.sampling for asked in triton.asked if "pause_session" in asked.sampling]


def asks_no_more(gateway: RunningGateway, triton: FakeTriton) -> None:
    """Send another request, which would follow a pause; there was none."""
    assert gateway.complete().ok
    assert len(triton.asked) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_called_tools_reach_the_server(gateway: RunningGateway, triton: FakeTriton, path: str, stream: bool) -> None:
    triton.answer = answered(CALL + OTHER_CALL + CALL + UNKNOWN_CALL)
    body = {"model": "demo", "session_id": "s", "tenant": "acme", "stream": stream, "deadline_ms": 60_000}
    gateway.post(path, BODIES[path] | body).raise_for_status()
    wait_for(lambda: pauses(triton), 60, "the pause")
    # Names come from the request's tools, not from the model alone.
    assert pauses(triton) == [{"pause_session": ["time", "weather"], "session_id": "s", "tenant": "acme"}]
    assert triton.asked[-1].inputs["text_input"] == ""


@pytest.mark.parametrize(
    ("text", "fields", "outputs"),
    [
        (CALL, {}, {}),
        ("one two", {"session_id": "s"}, {}),
        (UNKNOWN_CALL, {"session_id": "s"}, {}),
        (CALL[:-20], {"session_id": "s"}, {"finish_reason": "length"}),
    ],
    ids=["no session", "no call", "an unknown tool", "cut"],
)
@pytest.mark.parametrize("path", BODIES)
def test_other_answers_say_nothing(
    gateway: RunningGateway, triton: FakeTriton, path: str, text: str, fields: Any, outputs: Any
) -> None:
    triton.answer = answered(text, **outputs)
    gateway.post(path, BODIES[path] | {"model": "demo"} | fields).raise_for_status()
    asks_no_more(gateway, triton)


def test_a_pause_that_fails_is_silent(
    gateway: RunningGateway, triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(asked: Asked) -> Answer:
        if "pause_session" in asked.sampling:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "[TW-DRAINING] the server is shutting down")
        yield from say(asked, text_output=CALL)

    triton.answer = refuse
    for _ in range(2):
        assert gateway.chat(tools=CHAT_TOOLS, session_id="s").ok
    wait_for(lambda: len(pauses(triton)) == 2, 60, "pauses")
    assert gateway.get("/health").json()["ready"]
    assert not caplog.records


def test_a_client_cannot_send_one_itself(gateway: RunningGateway) -> None:
    answer = gateway.chat(session_id="s", pause_session=["weather"])
    assert answer.status_code == 400
    assert "the gateway sees which tools an answer calls" in answer.json()["error"]["message"]


@pytest.fixture
def tritons() -> Iterator[tuple[FakeTriton, FakeTriton]]:
    with running(FakeTriton(answer=answered(CALL))) as one, running(FakeTriton(answer=answered(CALL))) as other:
        yield one, other


def test_the_server_that_answered_hears_of_it(tritons: tuple[FakeTriton, FakeTriton]) -> None:
    with gateway_to(*(triton.port for triton in tritons)) as gateway:
        for session in map(str, range(8)):
            assert gateway.chat(tools=CHAT_TOOLS, session_id=session).ok
        wait_for(lambda: sum(map(len, map(pauses, tritons))) == 8, 60, "pauses")
    for triton in tritons:
        answered_here = {asked.sampling["session_id"] for asked in triton.asked if asked.inputs.get("messages")}
        assert {pause["session_id"] for pause in pauses(triton)} == answered_here
