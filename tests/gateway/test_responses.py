"""OpenAI's `/v1/responses`: what the backend is asked, answers and events, and responses that are continued."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import requests

from gateway.test_messages import CALL, FORCED, SCHEMA, conversation, events, fail, pieces, text
from support.gateway.running_gateway import RunningGateway, entry, gateway_to, say
from support.triton.grpc_triton import FakeTriton
from tidewheel.gateway import responses
from tidewheel.gateway.responses import ResponseStore, StoredResponse
from tidewheel_client.errors import Busy, EngineDead

TOOLS = [{"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA}]
THOUGHTS = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


@pytest.fixture(autouse=True)
def _answers(triton: FakeTriton) -> None:
    triton.answer = pieces("ab")


def ask(gateway: RunningGateway, given: Any = "one two", **fields: Any) -> requests.Response:
    return gateway.post("responses", {"model": "demo", "input": given, **fields})


def bare(item: Any) -> Any:
    """Return an item without its id."""
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_a_response(gateway: RunningGateway, triton: FakeTriton) -> None:
    fields = {"instructions": "Be kind", "max_output_tokens": 9, "temperature": 0.5, "metadata": {"a": "b"}}
    body = ask(gateway, **fields).json()
    assert body.pop("id").startswith("resp_")
    assert body.pop("created_at") > 0
    (item,) = body.pop("output")
    part = {"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}
    assert bare(item) == {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert body == {
        **fields,
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "demo",
        "store": True,
        "previous_response_id": None,
        "reasoning": None,
        "text": None,
        "top_p": None,
        "user": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 9,
        },
    }
    assert conversation(triton) == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": [text("one two")]},
    ]
    assert triton.asked[0].sampling["max_tokens"] == 9
    assert triton.asked[0].sampling["temperature"] == 0.5
    assert "session_id" not in triton.asked[0].sampling


def test_events(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = pieces("<think>H", "m.</think>", "Wait. ", CALL)
    found = events(ask(gateway, stream=True, tools=TOOLS))
    assert [event.pop("sequence_number") for event in found] == list(range(len(found)))
    created, in_progress, *middle, completed = found
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert completed["type"] == "response.completed"
    kinds = ["reasoning", "message", "function_call"]
    assert [item["type"] for item in completed["response"]["output"]] == kinds
    assert [(event["type"].removeprefix("response."), event["output_index"]) for event in middle] == [
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
    ]
    ended = [event["item"] for event in middle if event["type"] == "response.output_item.done"]
    assert ended == completed["response"]["output"]
    assert bare(ended[0]) == THOUGHTS | {"status": "completed"}
    assert bare(ended[2]) == {
        "type": "function_call",
        "name": "weather",
        "arguments": '{"city": "Paris"}',
        "status": "completed",
    }
    assert middle[7]["item"]["content"] == []
    assert (middle[9]["delta"], middle[10]["text"]) == ("Wait. ", "Wait. ")
    assert gateway.get(f"/v1/responses/{completed['response']['id']}").json() == completed["response"]


def test_a_cut_response(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = pieces("<think>Hm.</think>", "ab", finish_reason="length")
    for body in (ask(gateway).json(), events(ask(gateway, stream=True))[-1]["response"]):
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in body["output"]] == ["completed", "incomplete"]


def test_items(gateway: RunningGateway, triton: FakeTriton) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}", "status": "completed"}
    given = [
        {"role": "developer", "content": "Be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        THOUGHTS,
        {"type": "message", "id": "x", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "warm"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "cold"}]},
    ]
    choice = {"type": "function", "name": "weather"}
    triton.answer = pieces(FORCED)
    body = ask(gateway, given, tools=TOOLS, tool_choice=choice, store=False).json()
    assert (body["output"][0]["type"], body["tool_choice"], body["tools"]) == ("function_call", choice, TOOLS)
    function = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert conversation(triton)["messages"] == [
        {"role": "system", "content": [text("Be kind")]},
        {"role": "user", "content": [text("hi")]},
        {
            "role": "assistant",
            "content": [text("Wait.")],
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", **function}, {"id": "c2", **function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [text("warm")]},
        {"role": "tool", "tool_call_id": "c2", "content": [text("cold")]},
    ]
    assert gateway.get(f"/v1/responses/{body['id']}").status_code == 404


def test_a_continued_response(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = pieces(f"<think>Hm.</think>Wait. {CALL}")
    first = ask(gateway, "weather?", tools=TOOLS, instructions="Be kind").json()
    call = first["output"][2]
    triton.answer = pieces("warm")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "20"}
    second = ask(gateway, [output], previous_response_id=first["id"], tools=TOOLS).json()
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    turns = [
        {"role": "user", "content": [text("weather?")]},
        {
            "role": "assistant",
            "content": [text("Wait. ")],
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": call["call_id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call["call_id"], "content": [text("20")]},
    ]
    assert conversation(triton)["messages"] == turns
    assert triton.asked[-1].sampling["session_id"] == first["id"]
    assert second["previous_response_id"] == first["id"]
    ask(gateway, "and Rome?", previous_response_id=second["id"], stream=True).raise_for_status()
    answer = {"role": "assistant", "content": [text("warm")]}
    assert conversation(triton) == [*turns, answer, {"role": "user", "content": [text("and Rome?")]}]
    assert triton.asked[-1].sampling["session_id"] == first["id"]


def test_a_deleted_response(gateway: RunningGateway, triton: FakeTriton) -> None:
    found = ask(gateway).json()["id"]
    url = f"{gateway.url}/v1/responses/{found}"
    assert gateway.session.delete(url, timeout=30).json() == {"id": found, "object": "response", "deleted": True}
    assert gateway.session.delete(url, timeout=30).status_code == 404
    answer = ask(gateway, previous_response_id=found)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "previous_response_not_found",
        "previous_response_id",
    )


def test_a_response_is_its_tenant_s(triton: FakeTriton, served: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("one", tenant="acme") + entry("two", tenant="acme") + entry("other"))
    with gateway_to(served[0].port, keys=keys) as gateway:
        as_one, as_two, as_other = ({"Authorization": f"Bearer {name}"} for name in ("one", "two", "other"))
        body = {"model": "demo", "input": "x"}
        found = gateway.post("responses", body, headers=as_one).json()["id"]
        goes_on = {**body, "previous_response_id": found}
        assert gateway.get(f"/v1/responses/{found}", headers=as_two).status_code == 200
        assert gateway.post("responses", goes_on, headers=as_two).status_code == 200
        assert gateway.get(f"/v1/responses/{found}", headers=as_other).status_code == 404
        assert gateway.post("responses", goes_on, headers=as_other).status_code == 400
        assert gateway.session.delete(f"{gateway.url}/v1/responses/{found}", headers=as_other).status_code == 404


def test_a_conversation_that_is_too_large(
    gateway: RunningGateway, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "MAX_CONVERSATION_BYTES", 100)
    found = ask(gateway, "x" * 200).json()["id"]
    error = ask(gateway, previous_response_id=found).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "at most 100 are allowed" in error["message"]


def stored(size: int, expires_at: float = 9.0) -> StoredResponse:
    return StoredResponse(b"x" * (size - responses._ENTRY_BYTES), b"", "", expires_at)


def test_the_owner_with_most_bytes_makes_room() -> None:
    store = ResponseStore(10_000)
    for name in "abc":
        store.put("one", name, stored(2000))
    store.put("other", "d", stored(3000))
    store.put("other", "e", stored(2000))
    assert [store.get("one", name) is not None for name in "abc"] == [False, True, True]
    store.put("other", "f", stored(2000))
    assert store.get("other", "d") is None
    assert store.get("one", "e") is None
    store.put("one", "g", stored(20_000))  # has no room at all
    assert store.get("one", "g") is None
    assert store.get("other", "f") is not None


def test_responses_expire() -> None:
    store = ResponseStore(10_000)
    store.put("one", "a", stored(2000, expires_at=3.0))
    store.put("one", "b", stored(2000, expires_at=5.0))
    store.expire(4.0)
    assert (store.get("one", "a"), store.get("one", "b") is None) == (None, False)
    store.expire(5.0)
    assert not store._num_bytes


def test_workers_store_nothing() -> None:
    turn = responses.ResponseTurn(ResponseStore(0), "")
    turn.read({"input": "x"})
    turn.keep({"output": []})
    assert not turn.is_stored
    with pytest.raises(responses.Unsupported, match="store is true: workers of a gateway share no answers"):
        turn.read({"input": "x", "store": True})
    with pytest.raises(responses.PreviousResponseMissing):
        turn.read({"input": "x", "previous_response_id": turn.id})


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(gateway: RunningGateway, triton: FakeTriton, mode: str) -> None:
    triton.answer = pieces(FORCED)
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "weather"}]}
    other = {"type": "function", "name": "other", "parameters": {"type": "object"}}
    body = ask(gateway, tools=[*TOOLS, other], tool_choice=choice).json()
    assert body["tool_choice"] == choice
    names = [tool["function"]["name"] for tool in conversation(triton)["tools"]]
    assert names == (["weather"] if mode == "auto" else ["weather", "other"])
    assert conversation(triton).get("tool_choice", []) == ["weather"] * (mode == "required")


@pytest.mark.parametrize(
    ("effort", "variables"),
    [
        ("none", {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}),
        ("high", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_reasoning(gateway: RunningGateway, triton: FakeTriton, effort: str, variables: Any) -> None:
    reasoning = {"effort": effort, "summary": "auto"}
    body = ask(gateway, reasoning=reasoning, include=["reasoning.encrypted_content"]).json()
    assert body["reasoning"] == reasoning
    assert conversation(triton)["chat_template_kwargs"] == variables


def test_a_schema(gateway: RunningGateway, triton: FakeTriton) -> None:
    named = {"name": "place", "schema": SCHEMA, "strict": True}
    body = ask(gateway, text={"format": {"type": "json_schema", **named}}).json()
    assert body["text"] == {"format": {"type": "json_schema", **named}}
    assert triton.asked[0].sampling["response_format"] == {"type": "json_schema", "json_schema": named}
    ask(gateway, text={"format": {"type": "json_object"}}).raise_for_status()
    assert triton.asked[1].sampling["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "send text"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "'web_search_call'"),
        ({"background": True}, "background", "send false"),
        ({"conversation": "x"}, "conversation", "send previous_response_id"),
        ({"include": ["message.output_text.logprobs"]}, "include", "leave it out"),
        ({"truncation": "auto"}, "truncation", "send disabled"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "Invalid enum value"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "Invalid enum value"),
        ({"messages": []}, "messages", "is a field of /v1/chat/completions"),
        ({"max_tokens": 5}, "max_tokens", "send max_output_tokens"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice", "it must be auto"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice", "must have a mode"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "is a field of /v1/chat/completions"),
    ],
    ids=str,
)
def test_wrong_requests(
    gateway: RunningGateway, triton: FakeTriton, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = ask(gateway, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]
    assert triton.asked == []


def test_other_kinds_of_tools_are_left_to_the_backend(gateway: RunningGateway, triton: FakeTriton) -> None:
    """It refuses them by name."""
    ask(gateway, tools=[{"type": "web_search"}]).raise_for_status()
    assert conversation(triton)["tools"] == [{"type": "web_search", "function": {}}]


def test_errors_in_a_stream(gateway: RunningGateway, triton: FakeTriton) -> None:
    for error, code in ((Busy("full"), "rate_limit_exceeded"), (EngineDead("dead"), "server_error")):
        triton.answer = fail(error)
        assert ask(gateway, stream=True).json()["error"]["message"] == error.message
        triton.answer = fail(error, after="a")
        *_, failed = events(ask(gateway, stream=True))
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"]["code"] == code
        assert failed["response"]["error"]["message"] == error.message


def test_parallel_calls(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output=CALL + CALL)
    assert len(ask(gateway, tools=TOOLS).json()["output"]) == 2
    (only,) = ask(gateway, tools=TOOLS, parallel_tool_calls=False).json()["output"]
    assert json.loads(only["arguments"]) == {"city": "Paris"}


def test_a_request_without_input(gateway: RunningGateway, triton: FakeTriton) -> None:
    error = gateway.post("responses", {"model": "demo", "instructions": "Be kind"}).json()["error"]
    assert (error["param"], error["message"]) == ("input", "input is missing: it is required")
    first = ask(gateway).json()["id"]
    gateway.post("responses", {"model": "demo", "previous_response_id": first}).raise_for_status()
    assert [message["role"] for message in conversation(triton)] == ["user", "assistant"]


def test_a_long_conversation_is_read_beside_the_streams(
    gateway: RunningGateway, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(gateway, "x" * 100_000).json()["id"]
    threads, read = [], responses.ResponseTurn.read

    def note(turn: responses.ResponseTurn, fields: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(turn, fields)

    monkeypatch.setattr(responses.ResponseTurn, "read", note)
    ask(gateway).raise_for_status()
    ask(gateway, previous_response_id=first).raise_for_status()
    assert ["asyncio" in name for name in threads] == [False, True]
