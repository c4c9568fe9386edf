"""What the gateway refuses, and what it sends to the backend."""

from __future__ import annotations

import json
import socket
from typing import Any

import grpc
import pytest

from support.gateway.running_gateway import RunningGateway, gateway_to, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, Refused, response
from tidewheel_client import grpc_transport

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}


def test_parameters_go_to_the_backend_as_they_are(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = say
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["a"], "max_tokens": 3,
        "min_tokens": 1, "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "n": 1,
        "logit_bias": {"5": 1}, "stop_token_ids": [1], "bad_words": ["b"], "ignore_eos": True, "priority": 2,
        "deadline_ms": 1000, "session_id": "s", "cache_salt": "c", "tenant": "t", "include_stop_str_in_output": True,
        "skip_special_tokens": False, "response_format": {"type": "text"}, "made_up": 1,
    }  # fmt: skip
    assert gateway.complete(**given).ok
    assert gateway.chat(**given, user=None).ok
    assert [asked.sampling for asked in triton.asked] == [given, given]


def test_objectives_come_from_the_body_then_its_metadata_then_headers(
    gateway: RunningGateway, triton: FakeTriton
) -> None:
    triton.answer = say
    older = {"x-slo-ttft-ms": "400", "x-slo-tpot-ms": "40"}
    metadata = {"ttft_ms": "300", "objective_action": "refuse", "run": "5"}
    assert gateway.chat(max_tokens=5, headers=older | {"X-LLM-D-SLO-TTFT-MS": "350"}).ok
    assert gateway.chat(max_tokens=5, headers=older, metadata=metadata).ok
    assert gateway.chat(max_tokens=5, headers=older, metadata=metadata, ttft_ms=200, tpot_ms=20).ok
    assert [asked.sampling for asked in triton.asked] == [
        {"n": 1, "max_tokens": 5, "ttft_ms": "350", "tpot_ms": "40"},
        {"n": 1, "max_tokens": 5, "ttft_ms": "300", "tpot_ms": "40", "objective_action": "refuse"},
        {"n": 1, "max_tokens": 5, "ttft_ms": 200, "tpot_ms": 20, "objective_action": "refuse"},
    ]


@pytest.mark.parametrize("tier", ["auto", "default", "flex"])
def test_fields_that_clients_send_by_themselves_have_no_effect(
    gateway: RunningGateway, triton: FakeTriton, tier: str
) -> None:
    triton.answer = say
    fields = {
        "user": "me", "metadata": {"run": "5"}, "prompt_cache_key": "k", "safety_identifier": "i", "store": False,
        "service_tier": tier,
    }  # fmt: skip
    assert gateway.complete(**fields).ok
    assert gateway.chat(**fields, max_tokens=5).ok
    assert [asked.sampling for asked in triton.asked] == [{"n": 1}, {"n": 1, "max_tokens": 5}]


def test_an_answer_of_a_chat_is_as_long_as_the_context(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = say
    gateway.chat()
    gateway.chat(max_tokens=None, max_completion_tokens=5)
    gateway.complete()
    chat, limited, completion = (asked.sampling for asked in triton.asked)
    assert chat == {"max_tokens": 2**31 - 1, "n": 1}
    assert limited == {"max_tokens": 5, "n": 1}
    assert completion == {"n": 1}


@pytest.mark.parametrize("text", [",[:{" * 80_000, '"' * 90_000, '\\"[' * 90_000 + "\\", "é" * 150_000])
def test_a_large_text_may_hold_anything(gateway: RunningGateway, triton: FakeTriton, text: str) -> None:
    triton.answer = say
    assert gateway.complete(text).ok
    assert triton.asked[0].inputs["text_input"] == text


def test_many_token_ids(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = say
    assert gateway.complete(list(range(100_000))).ok
    assert triton.asked[0].inputs["input_ids"] == list(range(100_000))


def test_errors_name_the_field_that_the_client_sent(gateway: RunningGateway, triton: FakeTriton) -> None:
    for text, fields, param in (
        ("logprobs is 99: it must be 0 to 20", {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("max_tokens is -5: it must be 1 to 9", {"max_completion_tokens": -5}, "max_completion_tokens"),
        ("max_tokens is -5: it must be 1 to 9", {"max_tokens": -5, "max_completion_tokens": -5}, "max_tokens"),
    ):
        triton.answer = lambda asked, text=text: refused(f"[TW-INPUT] {text}")
        error = gateway.chat(**fields).json()["error"]
        assert error["param"] == param
        assert error["message"] == f"{param} {text.partition(' ')[2]}"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_schema_of_a_forced_call(
    gateway: RunningGateway, triton: FakeTriton, choice: Any, stream: bool
) -> None:
    names, said = ["weather", "time"], "tools: parameters of time: maximum is 1e300: beyond"
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    triton.answer = lambda asked: refused(f"[TW-UNSUPPORTED] {said}")
    error = gateway.chat(tools=tools, tool_choice=choice, stream=stream).json()["error"]
    asked = json.loads(triton.asked[0].inputs["messages"])
    assert asked["tool_choice"] == (names if choice == "required" else ["time"])
    assert error["message"] == said
    assert error["param"] == "tools"


def test_errors_name_the_schema_of_a_client(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: refused("[TW-INPUT] structured_outputs.json is 5: it must be")
    error = gateway.chat(structured_outputs={"json": 5}).json()["error"]
    assert (error["message"].split(" ")[0], error["param"]) == ("structured_outputs.json", "structured_outputs.json")


def refused(text: str) -> Answer:
    raise Refused(grpc.StatusCode.UNKNOWN, text)
    yield


def test_messages_that_clients_send_back(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = say
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "audio": None},
    ]
    assert gateway.post("chat/completions", {"model": "demo", "messages": messages}).ok
    assert json.loads(triton.asked[0].inputs["messages"]) == [
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "content": "hi"},
    ]


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("completions", b"[" * 16_000, "nested too deep", None),
        ("completions", b"[" * 100_000, "more than 32768 lists, objects and keys, or 262144 values", None),
        ("completions", b'{"prompt": [' + b"1," * 300_000 + b"1]}", "more than 32768 lists", None),
        ("completions", b'{"x": "' + b'\\"' * 30_000 + b'", "y": [' + b"[]," * 40_000 + b"1]}", "32768 lists", None),
        ("completions", {"prompt": "x", **{f"k{i}": 1 for i in range(256)}}, "the body has 257 fields", None),
        ("completions", {"prompt": "x", "k" * 300: 1}, "a field's name has 300 characters: at most 256", None),
        ("completions", {"prompt": "x", "suffix": "s" * 300_000}, "the parameters have 300013 bytes", None),
        ("completions", b'{"prompt": ', "not JSON", None),
        ("completions", b"[]", "must be a JSON object", None),
        ("completions", b'{"prompt": "\xff"}', "not JSON", None),
        ("completions", b'{"prompt": NaN}', "not JSON", None),
        ("completions", b'{"seed": ' + b"9" * 10_000 + b"}", "", None),
        ("completions", {"model": "demo"}, "prompt is missing: it is required", "prompt"),
        ("embeddings", {}, "input is missing: it is required", "input"),
        ("completions", {"prompt": "x", "user": 5}, "user: Expected `str`, got `int`", "user"),
        ("chat/completions", {**CHAT, "metadata": {"a": 1}}, "metadata[...]: Expected `str`", "metadata[...]"),
        ("chat/completions", {**CHAT, "prompt_cache_key": []}, "prompt_cache_key: Expected", "prompt_cache_key"),
        ("embeddings", {"input": "x", "safety_identifier": 1}, "safety_identifier: Expected", "safety_identifier"),
        ("chat/completions", {**CHAT, "store": True}, "store is set: answers are not stored: send false", "store"),
        ("chat/completions", {**CHAT, "store": 0}, "store: Expected `bool`", "store"),
        ("chat/completions", {**CHAT, "service_tier": "priority"}, "no tiers: send priority", "service_tier"),
        ("chat/completions", {"model": "demo"}, "messages is missing: it is required", "messages"),
        ("chat/completions", {**CHAT, "functions": [{}]}, "functions is set: send tools", "functions"),
        ("chat/completions", {**CHAT, "function_call": {}}, "send tools and tool_choice", "function_call"),
        ("chat/completions", {**CHAT, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens is 5", "max_tokens"),
        ("completions", {"prompt": 5}, "prompt: Expected `str | array`", "prompt"),
        ("completions", {"prompt": []}, "prompt has 0 entries", "prompt"),
        ("completions", {"prompt": ["x"] * 65}, "prompt has 65 entries: it must have 1 to 64", "prompt"),
        ("completions", {"prompt": ["x", 5]}, "prompt mixes texts", "prompt"),
        ("completions", {"prompt": ["x", [5]]}, "prompt mixes texts", "prompt"),
        ("completions", {"prompt": [2**40]}, "prompt must be a sequence of int32", "prompt"),
        ("completions", {"prompt": "x", "n": "two"}, "n: Expected `int`, got `str`", "n"),
        ("completions", {"prompt": "x", "stream": "yes"}, "stream: Expected `bool`", "stream"),
        ("completions", {"prompt": "x", "stream_options": {}}, "stream is not true", "stream_options"),
        ("completions", {"prompt": "x", "stream_options": {"usage": True}}, "`usage`", "stream_options"),
        ("completions", {"prompt": "x", "echo": "yes"}, "echo: Expected `bool`", "echo"),
        ("chat/completions", {**CHAT, "echo": True}, "echo is set", "echo"),
        ("completions", {"prompt": "x", "request_id": "x" * 129}, "request_id must have", "request_id"),
        ("completions", {"prompt": "x", "return_logprobs": True}, "unknown parameter 'return_logprobs'", None),
        ("chat/completions", {"messages": "x"}, "messages: Expected `array`", "messages"),
        ("chat/completions", {"messages": [5]}, "messages[0]: Expected `object`", "messages[0]"),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs is 2", "top_logprobs"),
        ("chat/completions", {**CHAT, "logprobs": 2}, "logprobs: Expected `bool`", "logprobs"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice forces a call", "tool_choice"),
        ("chat/completions", {**CHAT, "tool_choice": {"type": "function"}}, "or an object of the", "tool_choice"),
        ("chat/completions", {**CHAT, "tools": {}}, "tools: Expected `array`", "tools"),
        ("chat/completions", {**CHAT, "priority": [1]}, "priority: Expected `int", "priority"),
        ("chat/completions", {**CHAT, "priority": "urgent"}, "or critical, high, normal or low", "priority"),
        ("chat/completions", {**CHAT, "priority": 5}, "priority is 5: it must be 0 (default) to 4", "priority"),
        ("chat/completions", {**CHAT, "reasoning_effort": "huge"}, "Invalid enum value", "reasoning_effort"),
    ],
)  # fmt: skip
def test_bad_bodies(
    gateway: RunningGateway, triton: FakeTriton, path: str, body: Any, message: str, param: str | None
) -> None:
    answer = gateway.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert triton.asked == []


def test_a_body_must_be_plain_json(gateway: RunningGateway) -> None:
    for headers in ({"Content-Type": "text/plain"}, {"Content-Encoding": "gzip"}):
        answer = gateway.post("completions", {"prompt": "x"}, headers=headers)
        assert answer.status_code == 400
        assert next(iter(headers)) in answer.json()["error"]["message"]


def test_a_body_that_says_it_is_too_large_is_not_read(gateway: RunningGateway) -> None:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        "Content-Length: 9999999999",
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join((*lines, "", "")).encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_is_too_large_is_not_parsed(gateway: RunningGateway) -> None:
    answer = gateway.post("completions", b'{"prompt": "' + b"x" * (1 << 20) + b'"}')
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_paths_and_methods(gateway: RunningGateway) -> None:
    unknown, wrong = gateway.get("/v1/nothing"), gateway.get("/v1/completions")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["Allow"] == "POST"
    assert wrong.json()["error"]["message"] == "GET /v1/completions: use POST"


@pytest.mark.parametrize("model", ["other", "demo_infer"])
def test_models_that_are_not_served(gateway: RunningGateway, model: str) -> None:
    for answer in (gateway.complete(model=model), gateway.get(f"/v1/models/{model}")):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "served is demo" in answer.json()["error"]["message"]


def test_the_only_model_needs_no_name(gateway: RunningGateway) -> None:
    assert gateway.complete(model=None).json()["model"] == "demo"


def test_models(gateway: RunningGateway) -> None:
    (card,) = gateway.get("/v1/models").json()["data"]
    assert card["id"] == "demo"
    assert gateway.get("/v1/models/demo").json() == card


@pytest.mark.parametrize(
    ("header", "passed_on"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", False),
        ("nonsense", False),
    ],
)
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_the_client_s_trace_is_passed_on(
    gateway: RunningGateway, triton: FakeTriton, header: str, passed_on: bool, prompt: Any
) -> None:
    body = {"model": "demo", "prompt": prompt}
    assert gateway.post("completions", body, headers={"traceparent": header}).ok
    assert len(triton.asked) == len(prompt)
    for asked in triton.asked:
        assert asked.message.parameters["traceparent"].string_param == (header if passed_on else "")


@pytest.mark.parametrize(
    ("text", "status", "code", "retry"),
    [
        ("[TW-INPUT] n is 99: it must be 1 to 16", 400, "invalid_value", None),
        ("[TW-TOO-LARGE] text_input has 9 tokens", 400, "context_length_exceeded", None),
        ("[TW-UNSUPPORTED] tools is [...]: tool calls are not offered", 400, "unsupported_parameter", None),
        ("[TW-BUSY retry_after_ms=2500] waiting set is full", 429, "rate_limit_exceeded", ("3", "2500")),
        ("[TW-KV-FULL retry_after_ms=90] waiting set is full", 429, "rate_limit_exceeded", ("1", "90")),
        ("[TW-DRAINING] the server is shutting down", 503, "service_unavailable", ("1", "1000")),
        ("[TW-ENGINE-DEAD retry_after_ms=10] the engine died", 503, "service_unavailable", ("1", "10")),
        ("[TW-DEADLINE] deadline_ms has passed", 504, "deadline_exceeded", None),
        ("[TW-NUMERIC] the logits are not finite", 500, "internal_error", None),
        ("something else", 500, "internal_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_backend(
    gateway: RunningGateway,
    triton: FakeTriton,
    stream: bool,
    text: str,
    status: int,
    code: str,
    retry: tuple[str, str] | None,
) -> None:
    def refuse(asked: Asked) -> Answer:
        raise Refused(grpc.StatusCode.UNKNOWN, text)
        yield

    triton.answer = refuse
    answer = gateway.complete(n=1, stream=stream)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    message = (text.partition("] ")[2] or text).replace("text_input", "prompt")  # as the client named it
    assert error["message"] == message
    assert error["param"] == (message.split()[0] if message.split()[0] in ("n", "prompt") else None)
    assert answer.headers["x-should-retry"] == str(retry is not None).lower()
    assert (answer.headers.get("Retry-After"), answer.headers.get("retry-after-ms")) == (retry or (None, None))


def test_no_request_is_cancelled_as_its_error_is_sent(
    gateway: RunningGateway, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_transport, "END_S", 60.0)
    was_cancelled = triton.refuse_and_listen("[TW-INPUT] no")
    assert gateway.complete().status_code == 400
    assert was_cancelled == [False]


def test_an_error_in_the_middle_of_a_stream(gateway: RunningGateway, triton: FakeTriton) -> None:
    def answer(asked: Asked) -> Answer:
        yield response(asked.message, text_output="a", finish_reason="None")
        raise Refused(grpc.StatusCode.UNKNOWN, "[TW-ENGINE-DEAD] the engine died")

    triton.answer = answer
    first, last = (line for line in gateway.complete(stream=True).text.splitlines() if line)
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
    assert json.loads(last.removeprefix("data: "))["error"]["tag"] == "TW-ENGINE-DEAD"


def test_an_error_of_one_prompt_ends_all(gateway: RunningGateway, triton: FakeTriton) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.inputs["text_input"] == "bad":
            raise Refused(grpc.StatusCode.UNKNOWN, "[TW-INPUT] no")
        yield from say(asked)

    triton.answer = answer
    assert gateway.complete(["good", "bad", "good"]).status_code == 400


def test_without_a_server() -> None:
    with gateway_to(1) as alone:
        assert alone.get("/health").status_code == 503
        answer = alone.complete()
        assert answer.status_code == 503
        assert "no server answers at 127.0.0.1:1" in answer.json()["error"]["message"]
