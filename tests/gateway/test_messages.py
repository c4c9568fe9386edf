"""Anthropic's `/v1/messages`: what the backend is asked, and answers, events and errors in Anthropic's shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests
from tritonclient.grpc import service_pb2 as pb

from support.gateway.running_gateway import RunningGateway, entry, gateway_to, perf, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, response
from tidewheel_client.errors import Busy, Draining, RequestError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}]
AS_CHAT = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
FORCED = '{"name": "weather", "arguments": {"city": "Paris"}}'


def ask(gateway: RunningGateway, content: Any = "one two", **fields: Any) -> requests.Response:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return gateway.post("messages", {"model": "demo", "max_tokens": 9, "messages": messages, **fields})


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def events(answer: requests.Response) -> list[Any]:
    """Return the JSON of every event, whose name is its type."""
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def conversation(triton: FakeTriton) -> Any:
    return json.loads(triton.asked[-1].inputs["messages"])


def pieces(*texts: str, **last: Any) -> Any:
    """Return an answer that comes in pieces, or at once if it is no stream."""

    def answer(asked: Asked) -> Answer:
        streamed = texts if asked.inputs["stream"] else ["".join(texts)]
        for piece in streamed[:-1]:
            yield response(
                asked.message, text_output=piece, finish_reason="None", num_input_tokens=("UINT32", "I", [7])
            )
        yield from say(asked, text_output=streamed[-1], **perf(4), **last)

    return answer


@pytest.fixture(autouse=True)
def _answers(triton: FakeTriton) -> None:
    triton.answer = pieces("ab")


def test_an_answer(gateway: RunningGateway, triton: FakeTriton) -> None:
    answer = ask(gateway, system="Be kind", request_id="mine", temperature=0.5, top_k=3, metadata={"user_id": "x"})
    assert answer.json() == {
        "id": "msg_mine",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [text("ab")],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 2,
        },
    }
    assert conversation(triton) == [
        {"role": "system", "content": [text("Be kind")]},
        {"role": "user", "content": [text("one two")]},
    ]
    asked = triton.asked[0].sampling
    assert {key: asked[key] for key in ("max_tokens", "temperature", "top_k")} == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
    }


def test_events(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = pieces("<think>H", "m.</think>", "Wait. ", CALL)
    answer = ask(gateway, stream=True, tools=TOOLS)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    start, ping, *middle, delta, stop = events(answer)
    assert (start["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == 7
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["cache_read_input_tokens"] == 4
    call_id = middle[8]["content_block"].pop("id")
    assert call_id
    assert [(one["type"], one["index"], one.get("content_block") or one.get("delta")) for one in middle] == [
        ("content_block_start", 0, {"type": "thinking", "thinking": "", "signature": ""}),
        ("content_block_delta", 0, {"type": "thinking_delta", "thinking": "H"}),
        ("content_block_delta", 0, {"type": "thinking_delta", "thinking": "m."}),
        ("content_block_delta", 0, {"type": "signature_delta", "signature": "unsigned"}),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, text("")),
        ("content_block_delta", 1, {"type": "text_delta", "text": "Wait. "}),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, {"type": "tool_use", "name": "weather", "input": {}}),
        ("content_block_delta", 2, {"type": "input_json_delta", "partial_json": '{"city": "Paris"}'}),
        ("content_block_stop", 2, None),
    ]


def test_blocks_of_a_conversation(gateway: RunningGateway, triton: FakeTriton) -> None:
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
        text("Wait."),
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "warm", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_result", "tool_use_id": "c2", "content": [text("no such city")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "c3"},
        text("Go on."),
    ]
    turns = [{"role": "user", "content": [text("hi")]}, {"role": "assistant", "content": said}]
    system = [text("a") | {"cache_control": {"type": "ephemeral"}}, text("b")]
    ask(gateway, [*turns, {"role": "user", "content": results}], system=system, tools=TOOLS).raise_for_status()
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    assert conversation(triton) == {
        "tools": AS_CHAT,
        "messages": [
            {"role": "system", "content": [text("a"), text("b")]},
            {"role": "user", "content": [text("hi")]},
            {"role": "assistant", "content": [text("Wait.")], "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [text("warm")]},
            {"role": "tool", "tool_call_id": "c2", "content": [text("Error:"), text("no such city")]},
            {"role": "tool", "tool_call_id": "c3", "content": [text("")]},
            {"role": "user", "content": [text("Go on.")]},
        ],
    }


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=str)
def test_a_forced_call(gateway: RunningGateway, triton: FakeTriton, choice: dict[str, str]) -> None:
    triton.answer = pieces(FORCED)
    body = ask(gateway, tools=TOOLS, tool_choice=choice).json()
    (call,) = body["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Paris"})
    assert body["stop_reason"] == "tool_use"
    assert conversation(triton)["tool_choice"] == ["weather"]


def test_a_forced_call_that_is_cut(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = pieces(FORCED[:40], finish_reason="length")
    body = ask(gateway, tools=TOOLS, tool_choice={"type": "any"}).json()
    assert (body["content"][0]["input"], body["stop_reason"]) == ({}, "max_tokens")


def test_one_call_at_most_and_none(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = pieces(CALL, CALL)
    assert len(ask(gateway, tools=TOOLS).json()["content"]) == 2
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(gateway, tools=TOOLS, tool_choice=one).json()["content"]) == 1
    assert ask(gateway, tools=TOOLS, tool_choice={"type": "none"}).json()["content"] == [text(CALL + CALL)]
    assert isinstance(conversation(triton), list)


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True, "thinking": True}),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
        ),
        (
            {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False, "a": 1}},
            {"enable_thinking": False, "a": 1},
        ),
    ],
    ids=str,
)
def test_thinking(gateway: RunningGateway, triton: FakeTriton, fields: dict[str, Any], variables: Any) -> None:
    triton.answer = pieces("<think>Hm.</think>5")
    content = ask(gateway, **fields).json()["content"]
    assert content == [{"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}, text("5")]
    found = conversation(triton)
    assert (found["chat_template_kwargs"] if isinstance(found, dict) else None) == variables


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence(gateway: RunningGateway, triton: FakeTriton, stream: bool) -> None:
    triton.answer = pieces("one ", "two END")
    answer = ask(gateway, stop_sequences=["D", "END"], stream=stream)
    found = events(answer)[-2]["delta"] if stream else answer.json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")
    assert "END" not in json.dumps(events(answer)[:-2] if stream else answer.json()["content"])
    asked = triton.asked[0].sampling
    assert (asked["stop"], asked["include_stop_str_in_output"]) == (["D", "END"], True)
    triton.answer = pieces("one END", finish_reason="length")
    assert ask(gateway, stop_sequences=["END"]).json()["stop_reason"] == "max_tokens"


def test_a_schema(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = pieces("{}")
    ask(gateway, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).raise_for_status()
    named = {"name": "answer", "schema": SCHEMA}
    assert triton.asked[0].sampling["response_format"] == {"type": "json_schema", "json_schema": named}


def test_count_of_tokens(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output=json.dumps({"count": 12, "tokens": [5]}))
    body = {"model": "demo", "system": "x", "messages": [{"role": "user", "content": "y"}], "tools": TOOLS}
    assert gateway.post("messages/count_tokens", body).json() == {"input_tokens": 12}
    assert triton.asked[0].inputs["task"] == "tokenize"
    assert conversation(triton)["tools"] == AS_CHAT
    assert [one["role"] for one in conversation(triton)["messages"]] == ["system", "user"]


PICTURE = [{"role": "user", "content": [text("a"), {"type": "image", "source": {"type": "url", "url": "x"}}]}]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens is missing: it is required"),
        ({"messages": PICTURE}, "messages[0].content[1] is no part that is offered, or lacks a field ('image')"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages end with an assistant's"),
        ({"system": [{"type": "text"}]}, "system[0] is no part"),
        ({"response_format": {"type": "json_object"}}, "response_format is a field of /v1/chat/completions"),
        ({"n": 2}, "n is a field of /v1/chat/completions: leave it out"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": TOOLS}, "tool_choice forces a call of x"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: Invalid enum value 'between_tools'"),
        ({"priority": "urgent"}, "priority is urgent: it must be 0 (default) to 4 (lowest), or critical, high"),
        ({"stop": ["x"]}, "stop is set: send stop_sequences"),
        ({"context_management": {"edits": [{"type": "x"}]}}, "context_management is set"),
    ],
    ids=str,
)
def test_wrong_requests(gateway: RunningGateway, triton: FakeTriton, fields: dict[str, Any], said: str) -> None:
    answer = ask(gateway, **fields)
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"].startswith(said)
    assert triton.asked == []


def test_a_class_by_name(gateway: RunningGateway, triton: FakeTriton) -> None:
    ask(gateway, priority="high").raise_for_status()
    assert triton.asked[0].sampling["priority"] == 2


def test_an_empty_message_stays(gateway: RunningGateway, triton: FakeTriton) -> None:
    ask(gateway, [{"role": "user", "content": []}], system="Be kind").raise_for_status()
    assert [message["role"] for message in conversation(triton)] == ["system", "user"]


def test_neutral_fields(gateway: RunningGateway, triton: FakeTriton) -> None:
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    tools = [TOOLS[0] | {"type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}]
    ask(gateway, context_management=kept, service_tier="auto", tools=tools).raise_for_status()
    assert conversation(triton)["tools"] == AS_CHAT
    assert "context_management" not in triton.asked[0].sampling


def fail(error: RequestError, after: str = "") -> Any:
    def answer(asked: Asked) -> Answer:
        if after:
            yield response(asked.message, text_output=after, finish_reason="None")
        yield pb.ModelStreamInferResponse(error_message=str(error))

    return answer


def test_other_errors(gateway: RunningGateway, triton: FakeTriton) -> None:
    missing = ask(gateway, model="no")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert gateway.get("/v1/messages/x").json()["error"]["type"] == "not_found_error"
    wrong = gateway.post("messages", b"{")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
    large = gateway.post("messages", b" " * (2 << 20))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    triton.answer = fail(Busy("full", retry_after_ms=250))
    busy = ask(gateway)
    assert (busy.status_code, busy.headers["retry-after-ms"]) == (429, "250")
    assert busy.json() == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "full", "tag": "TW-BUSY"},
    }
    triton.answer = fail(Draining("over"))
    assert ask(gateway).json()["error"]["type"] == "overloaded_error"
    triton.answer = fail(Busy("full"), after="a")
    assert events(ask(gateway, stream=True))[-1]["error"]["message"] == "full"


def test_keys_in_anthropic_s_header(triton: FakeTriton, served: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("secret"))
    with gateway_to(served[0].port, keys=keys) as gateway:
        body = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        assert gateway.post("messages", body, headers={"x-api-key": "secret"}).status_code == 200
        assert gateway.post("messages", body, headers={"Authorization": "Bearer secret"}).status_code == 200
        assert triton.asked[-1].sampling["tenant"] == "secret"
        wrong = gateway.post("messages", body, headers={"x-api-key": "guessed"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
