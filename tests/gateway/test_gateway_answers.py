"""What clients of OpenAI's API get back, whole and as events."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.gateway.running_gateway import RunningGateway, events, perf, say, uints
from support.triton.grpc_triton import Answer, Asked, FakeTriton, response
from support.triton.serving import wait_for

LOGPROBS = [
    {
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": "é"},
        "6": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
    },
    {
        "8": {"logprob": None, "rank": 9, "decoded_token": "cd"},
        "6": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
    },
]


def test_chat(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, **perf(4))
    answer = gateway.chat(request_id="mine")
    assert answer.headers["x-request-id"] == "mine"
    body = answer.json()
    assert body.pop("created") > 0
    assert body == {
        "id": "chatcmpl-mine",
        "object": "chat.completion",
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    (asked,) = triton.asked
    assert asked.message.id == "mine"
    assert asked.inputs["stream"] is False
    assert json.loads(asked.inputs["messages"]) == [{"role": "user", "content": "one two"}]


def test_quantised_weights_are_named(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, **perf(4), weights="mixed")
    assert gateway.chat().json()["choices"][0]["weights"] == "mixed"
    assert events(gateway.chat(stream=True))[-1]["choices"][0]["weights"] == "mixed"


def test_completion(gateway: RunningGateway) -> None:
    body = gateway.complete("one two three").json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "one two three", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["completion_tokens"] == 3


def test_stream_of_a_completion(gateway: RunningGateway, triton: FakeTriton) -> None:
    answer = gateway.complete(stream=True)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    first, last = events(answer)
    assert first["choices"] == [{"index": 0, "text": "one ", "logprobs": None, "finish_reason": None}]
    assert last["choices"] == [{"index": 0, "text": "two", "logprobs": None, "finish_reason": "stop"}]
    assert first["id"] == last["id"]
    assert "usage" not in first
    assert triton.asked[0].inputs["stream"] is True


def test_stream_of_a_chat(gateway: RunningGateway, triton: FakeTriton) -> None:
    def answer(asked: Asked) -> Answer:
        yield response(asked.message, text_output="a", finish_reason="None")
        yield from say(asked, text_output="b")

    triton.answer = answer
    first, last = events(gateway.chat(stream=True))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert last["choices"][0]["delta"] == {"content": "b"}
    assert last["choices"][0]["finish_reason"] == "stop"


def test_usage_in_a_stream(gateway: RunningGateway) -> None:
    first, last, usage = events(gateway.complete(stream=True, stream_options={"include_usage": True}))
    assert first["usage"] is None
    assert last["usage"] is None
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = events(gateway.complete(stream=True, stream_options=options))
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 2, 2]


def test_several_sequences(gateway: RunningGateway, triton: FakeTriton) -> None:
    def answer(asked: Asked) -> Answer:
        yield response(
            asked.message,
            text_output=["a", "x"],
            finish_reason=["length", "None"],
            num_input_tokens=uints(7),
            num_output_tokens=uints(1, 2),
        )
        yield response(
            asked.message,
            text_output=["", "y"],
            finish_reason=["length", "stop"],
            num_input_tokens=uints(7),
            num_output_tokens=uints(0, 1),
            **perf(3, 6),
        )

    triton.answer = answer
    body = gateway.complete(n=2).json()
    assert [choice["text"] for choice in body["choices"]] == ["a", "xy"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop"]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 4,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},  # the first ended before the figures came
    }
    streamed = [event["choices"][0] for event in events(gateway.complete(n=2, stream=True))]
    assert [(one["index"], one["text"], one["finish_reason"]) for one in streamed] == [
        (0, "a", "length"),
        (1, "x", None),
        (1, "y", "stop"),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts(gateway: RunningGateway, triton: FakeTriton, stream: bool) -> None:
    answer = gateway.complete(
        ["one two", "three"], stream=stream, stream_options={"include_usage": True} if stream else None
    )
    if stream:
        *parts, last = events(answer)
        texts = {
            index: "".join(p["choices"][0]["text"] for p in parts if p["choices"][0]["index"] == index)
            for index in (0, 1)
        }
        usage = last["usage"]
    else:
        texts = {choice["index"]: choice["text"] for choice in answer.json()["choices"]}
        usage = answer.json()["usage"]
    assert texts == {0: "one two", 1: "three"}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (14, 3)
    assert len({asked.message.id for asked in triton.asked}) == 2


def test_token_ids_as_prompts(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = say
    assert gateway.complete([1, 2]).ok
    assert gateway.complete([[3], [4, 5]]).ok
    assert sorted(asked.inputs["input_ids"] for asked in triton.asked) == [[1, 2], [3], [4, 5]]


def test_logprobs_of_a_chat(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, logprobs=json.dumps(LOGPROBS))
    choice = gateway.chat(logprobs=True, top_logprobs=1).json()["choices"][0]
    assert triton.asked[0].sampling["logprobs"] == 1
    best = {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}
    assert choice["logprobs"]["content"] == [
        {**best, "top_logprobs": [best]},
        {
            "token": "cd",
            "logprob": -9999.0,
            "bytes": [99, 100],
            "top_logprobs": [{"token": "b", "logprob": -0.1, "bytes": [98]}],
        },
    ]
    bare = gateway.chat(logprobs=True).json()["choices"][0]
    assert triton.asked[1].sampling["logprobs"] == 0
    assert [entry["top_logprobs"] for entry in bare["logprobs"]["content"]] == [[], []]
    assert gateway.chat(logprobs=False).json()["choices"][0]["logprobs"] is None


def test_logprobs_of_a_completion(gateway: RunningGateway, triton: FakeTriton) -> None:
    def answer(asked: Asked) -> Answer:
        yield response(asked.message, text_output="éb", finish_reason="None", logprobs=json.dumps(LOGPROBS[:1] * 2))
        yield from say(asked, logprobs=json.dumps(LOGPROBS[1:]), text_output="cd")

    triton.answer = answer
    first, last = (event["choices"][0]["logprobs"] for event in events(gateway.complete(logprobs=2, stream=True)))
    assert first == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["é", "é"],
        "top_logprobs": [{"é": -0.5, "b": -1.5}] * 2,
    }
    assert last["text_offset"] == [2]
    partial = [{"7": {"logprob": -0.5, "rank": 1, "decoded_token": "\ufffd"}}]

    def one_character_of_three_tokens(asked: Asked) -> Answer:
        yield response(asked.message, text_output="€", finish_reason="None", logprobs=json.dumps(partial * 3))
        yield from say(asked, logprobs=json.dumps(LOGPROBS[1:]), text_output="cd")

    triton.answer = one_character_of_three_tokens
    offsets = [e["choices"][0]["logprobs"]["text_offset"] for e in events(gateway.complete(logprobs=1, stream=True))]
    whole = gateway.complete(logprobs=1).json()["choices"][0]["logprobs"]["text_offset"]
    assert [*offsets[0], *offsets[1]] == whole == [0, 1, 2, 3]
    triton.answer = lambda asked: say(asked, logprobs=json.dumps(LOGPROBS))
    assert gateway.complete(logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] is None


OF_PROMPT = [{"3": {"logprob": None, "rank": None, "decoded_token": "A "}}, LOGPROBS[0]]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_logprobs(gateway: RunningGateway, triton: FakeTriton, stream: bool) -> None:
    def answer(asked: Asked) -> Answer:
        outputs = {"logprobs": json.dumps(LOGPROBS[:1]), "prompt_logprobs": json.dumps(OF_PROMPT)}
        yield response(asked.message, text_output="A éé", finish_reason="None", **outputs)
        yield from say(asked, logprobs=json.dumps(LOGPROBS[1:]), text_output="cd")

    triton.answer = answer
    reply = gateway.complete("A é", echo=True, logprobs=1, prompt_logprobs=0, stream=stream)
    parts = [event["choices"][0] for event in events(reply)] if stream else reply.json()["choices"]
    assert triton.asked[0].sampling == {"echo": True, "logprobs": 1, "n": 1, "prompt_logprobs": 1}
    assert "".join(part["text"] for part in parts) == "A éécd"
    joined = {key: [item for part in parts for item in part["logprobs"][key]] for key in parts[0]["logprobs"]}
    assert joined["tokens"] == ["A ", "é", "é", "cd"]
    assert joined["token_logprobs"] == [None, -0.5, -0.5, -9999.0]
    assert joined["text_offset"] == [0, 2, 3, 4]
    assert joined["top_logprobs"][0] is None
    first, *others = parts
    assert first["prompt_logprobs"] == [None, LOGPROBS[0]]
    assert all("prompt_logprobs" not in part for part in others)


def test_logprobs_of_the_prompt_of_a_chat(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, prompt_logprobs=json.dumps(OF_PROMPT))
    answer = gateway.chat(prompt_logprobs=1).json()
    assert answer["prompt_logprobs"] == [None, LOGPROBS[0]]
    assert answer["choices"][0]["logprobs"] is None
    (event,) = events(gateway.chat(prompt_logprobs=1, stream=True))
    assert event["prompt_logprobs"] == [None, LOGPROBS[0]]


def test_token_ids(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, token_ids=("INT32", "i", [5, 6]))
    assert gateway.complete(return_token_ids=True).json()["choices"][0]["token_ids"] == [5, 6]
    assert "token_ids" not in gateway.complete().json()["choices"][0]


@pytest.mark.parametrize(("ours", "theirs"), [("deadline", "length"), ("cancelled", "length"), ("length", "length")])
def test_finish_reasons(gateway: RunningGateway, triton: FakeTriton, ours: str, theirs: str) -> None:
    triton.answer = lambda asked: say(asked, finish_reason=ours)
    choice = gateway.complete().json()["choices"][0]
    assert choice["finish_reason"] == theirs
    assert choice.get("stop_reason") == (None if ours == theirs else ours)


def test_a_client_that_goes_away_cancels(gateway: RunningGateway, triton: FakeTriton) -> None:
    release = threading.Event()

    def answer(asked: Asked) -> Answer:
        if asked.inputs["stream"]:
            yield response(asked.message, text_output="a", finish_reason="None")
        release.wait(30)
        yield from say(asked)

    def hang_up(**fields: Any) -> None:
        triton.ended.clear()
        triton.asked.clear()
        address = urlsplit(gateway.url)
        with contextlib.closing(http.client.HTTPConnection(str(address.hostname), address.port)) as connection:
            body = json.dumps({"model": "demo", "prompt": "x", **fields})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            wait_for(lambda: triton.asked, 60, "the request")
            if fields:
                assert connection.getresponse().readline()
        assert triton.ended.wait(60), "the request goes on"

    def num_hang_ups() -> float:
        lines = gateway.get("/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("tidewheel_gateway_hang_ups_total"))

    before = num_hang_ups()
    triton.answer = answer
    try:
        hang_up(stream=True)
        hang_up()
    finally:
        release.set()
    wait_for(lambda: num_hang_ups() == before + 2, 60, "the counts")


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def test_a_call_of_a_tool(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output=f"<think>Hm.</think>{CALL}\n{CALL}")
    choice = gateway.chat(tools=TOOLS, chat_template_kwargs={"enable_thinking": True}).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "Hm."
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"]
    assert first["type"] == "function"
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert triton.asked[0].sampling["skip_special_tokens"] is False
    assert json.loads(triton.asked[0].inputs["messages"]) == {
        "messages": [{"role": "user", "content": "one two"}],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    (only,) = gateway.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]["tool_calls"]
    assert only["function"] == first["function"]


def test_a_call_in_a_stream(gateway: RunningGateway, triton: FakeTriton) -> None:
    def answer(asked: Asked) -> Answer:
        for piece in ("<think>H", "m.</think>", "Wait.", CALL[:9], CALL[9:]):
            yield response(asked.message, text_output=piece, finish_reason="None")
        yield from say(asked, text_output="")

    triton.answer = answer
    choices = [event["choices"][0] for event in events(gateway.chat(tools=TOOLS, stream=True))]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "reasoning_content": "H"}
    assert deltas[1:3] == [{"reasoning_content": "m."}, {"content": "Wait."}]
    (call,) = deltas[3]["tool_calls"]
    assert call["index"] == 0
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert deltas[4:] == [{}]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["tool_calls"]


@pytest.mark.parametrize("has_one_call", [False, True])
def test_arguments_come_as_they_are_made(gateway: RunningGateway, triton: FakeTriton, has_one_call: bool) -> None:
    def answer(asked: Asked) -> Answer:
        for piece in ("<tool_", CALL[6:50], CALL[50:55], CALL[55:], f"\n{CALL[:48]}", CALL[48:]):
            yield response(asked.message, text_output=piece, finish_reason="None")
        yield from say(asked, text_output="")

    triton.answer = answer
    reply = gateway.chat(tools=TOOLS, stream=True, parallel_tool_calls=not has_one_call)
    deltas = [event["choices"][0]["delta"] for event in events(reply)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    first = calls.pop(0)
    assert (first["index"], first["type"]) == (0, "function")
    assert first["function"] == {"name": "weather", "arguments": CALL[44:50]}
    assert calls[:2] == [
        {"index": 0, "function": {"arguments": CALL[50:55]}},
        {"index": 0, "function": {"arguments": CALL[55:61]}},
    ]
    assert [call["index"] for call in calls[2:]] == ([] if has_one_call else [1, 1])
    assert "".join(call["function"]["arguments"] for call in calls[2:]) == ("" if has_one_call else CALL[44:61])


def test_strict_tools(gateway: RunningGateway, triton: FakeTriton) -> None:
    """The backend learns which functions are strict. Text that begins like an object is no call, and is not held."""

    def answer(asked: Asked) -> Answer:
        for piece in ('{"na', "m", "ing", '": 1}'):
            yield response(asked.message, text_output=piece, finish_reason="None")
        yield from say(asked, text_output="")

    triton.answer = answer
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    deltas = [event["choices"][0]["delta"] for event in events(gateway.chat(tools=strict, stream=True))]
    assert [delta.get("content") for delta in deltas] == ['{"naming', '": 1}', None]
    asked = json.loads(triton.asked[0].inputs["messages"])
    assert (asked["tools"], "tool_choice" in asked) == (strict, False)


def test_no_call_is_looked_for_unless_there_are_tools(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output=CALL)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = gateway.chat(**fields).json()["choices"][0]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
    assert all(isinstance(json.loads(asked.inputs["messages"]), list) for asked in triton.asked)


def test_a_call_that_is_cut_is_text(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output=CALL[:30], finish_reason="length")
    choice = gateway.chat(tools=TOOLS).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL[:30], "length")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_forced_call(gateway: RunningGateway, triton: FakeTriton, choice: object) -> None:
    """The backend is told which functions; thoughts may come before."""
    forced = '<think>{"name": "time"}</think>\n{"name": "weather", "arguments": {"city": "<think>"}}'
    triton.answer = lambda asked: say(asked, text_output=forced)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    answer = gateway.chat(tools=strict, tool_choice=choice).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "<think>"}'}
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["reasoning_content"] == '{"name": "time"}'
    asked = json.loads(triton.asked[0].inputs["messages"])
    assert (asked["tools"], asked["tool_choice"]) == (strict, ["weather"])
    assert asked.get("parallel_tool_calls", True) is (choice == "required")
    assert list(asked)[-1] == "messages"  # routers compare beginnings


def allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


SEVERAL = [*TOOLS, *({"type": "function", "function": {"name": name}} for name in ("time", "news"))]


def test_some_tools_are_allowed(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output=CALL)
    choice = gateway.chat(tools=SEVERAL, tool_choice=allowing("auto", "weather", "news")).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    shown = json.loads(triton.asked[0].inputs["messages"])["tools"]
    assert [tool["function"]["name"] for tool in shown] == ["weather", "news"]
    assert "structured_outputs" not in triton.asked[0].sampling


def test_one_of_some_tools_is_required(gateway: RunningGateway, triton: FakeTriton) -> None:
    """The prompt has all of them, so that its beginning stays cached."""
    triton.answer = lambda asked: say(asked, text_output='{"name": "time", "arguments": {}}')
    choice = gateway.chat(tools=SEVERAL, tool_choice=allowing("required", "time", "news")).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}
    (asked,) = triton.asked
    assert json.loads(asked.inputs["messages"])["tools"] == SEVERAL
    assert json.loads(asked.inputs["messages"])["tool_choice"] == ["time", "news"]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (allowing("auto", "weather", "radio"), "tool_choice allows 'radio': tools has no such function"),
        (allowing("required", "radio"), "tool_choice allows 'radio'"),
        (allowing("auto"), "it must have a mode, auto or required, and a list of tools"),
        (allowing("none", "weather"), "it must have a mode, auto or required"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "it must have a mode"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["weather"]}},
            "tool_choice is 'weather'",
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}}, "'mcp'"),
    ],
)
def test_tools_that_cannot_be_allowed(gateway: RunningGateway, triton: FakeTriton, choice: Any, said: str) -> None:
    answer = gateway.chat(tools=SEVERAL, tool_choice=choice)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["tag"]) == (400, "tool_choice", "TW-INPUT")
    assert said in error["message"]
    assert triton.asked == []


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "reasoning_effort": "high"},
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True, "reasoning_effort": "low"}},
            {"thinking": True, "reasoning_effort": "low"},
        ),
    ],
)
def test_effort(gateway: RunningGateway, triton: FakeTriton, fields: dict[str, Any], variables: Any) -> None:
    triton.answer = say
    assert gateway.chat(**fields).ok
    assert json.loads(triton.asked[0].inputs["messages"])["chat_template_kwargs"] == variables
    assert "reasoning_effort" not in triton.asked[0].sampling


@pytest.mark.parametrize("reason", ["length", "stop"])  # stop: by a stop string of the request
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_is_a_call(
    gateway: RunningGateway, triton: FakeTriton, stream: bool, reason: str
) -> None:
    def answer(asked: Asked) -> Answer:
        if stream:
            yield response(asked.message, text_output='{"name": "wea', finish_reason="None")
            yield from say(asked, text_output='ther", "arguments": {"ci', finish_reason=reason)
        else:
            yield from say(asked, text_output='{"name": "weather", "arguments": {"ci', finish_reason=reason)

    triton.answer = answer
    reply = gateway.chat(tools=TOOLS, tool_choice="required", stream=stream)
    choice = (events(reply)[-1] if stream else reply.json())["choices"][0]
    said = choice["delta" if stream else "message"]
    (call,) = said["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"ci'}
    assert (said.get("content"), choice["finish_reason"]) == (None, reason)


@pytest.mark.parametrize(
    "grammar",
    [
        {"structured_outputs": {"regex": "a"}},
        {"structured_outputs": '{"regex": "a"}'},
        {"response_format": {"type": "json_object"}},
        {"guided_choice": ["a"]},
        {"guided_decoding": {"json": {}}},
        {"guided_json": {}},
    ],
    ids=str,
)
def test_a_forced_call_beside_a_grammar_is_refused(
    gateway: RunningGateway, triton: FakeTriton, grammar: dict[str, Any]
) -> None:
    answer = gateway.chat(tools=TOOLS, tool_choice="required", **grammar)
    said = f"tool_choice forces a call, and {next(iter(grammar))} is set: send one of them"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)
    assert triton.asked == []


def test_a_forced_call_beside_fields_that_ask_for_no_grammar(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output='{"name": "weather", "arguments": {}}')
    neutral = {"structured_outputs": {"json": None}, "response_format": {"type": "text"}}
    choice = gateway.chat(tools=TOOLS, tool_choice="required", **neutral).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(triton.asked[0].inputs["messages"])["tool_choice"] == ["weather"]


def test_an_answer_in_a_grammar_has_no_thoughts(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output="<think>Hm.</think>5")
    for fields in ({"response_format": {"type": "json_object"}}, {"guided_regex": ".*"}):
        message = gateway.chat(**fields).json()["choices"][0]["message"]
        assert message["content"] == "<think>Hm.</think>5"
    free = gateway.chat(response_format={"type": "text"}).json()["choices"][0]["message"]
    assert (free["content"], free["reasoning_content"]) == ("5", "Hm.")
