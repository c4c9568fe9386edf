"""Requests as clients of Triton's vLLM backend send them: defaults, limits, names, and clients that hang up."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from support.faults.slowed import slowed_by
from support.triton.serving import Server, StreamError, grpc_inputs, grpc_stream, serving_demo, wait_for

pytestmark = pytest.mark.e2e

CONFIG = """
backend: "tidewheel"
parameters { key: "model" value { string_value: "weights" } }
parameters { key: "kv_cache_memory_mb" value { string_value: "64" } }
parameters { key: "default_max_tokens" value { string_value: "context" } }
parameters { key: "max_request_s" value { string_value: "6" } }
"""
TWIN = """
backend: "tidewheel"
model_transaction_policy { decoupled: false }
parameters { key: "engine_of" value { string_value: "demo" } }
parameters { key: "default_max_tokens" value { string_value: "3" } }
parameters { key: "max_request_s" value { string_value: "6" } }
"""
CONTEXT = 1024
LONG_PROMPT = list(range(100, 1100))
FIGURES: dict[str, Any] = {"ignore_eos": True, "return_num_output_tokens": True, "return_finish_reason": True}


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model under other settings of its front ends, on a slow device: an endless request meets its limit."""
    folder, slowed = tmp_path_factory.mktemp("bounded"), slowed_by(0.02, tmp_path_factory.mktemp("slow") / "seconds")
    (folder / "demo_infer" / "1").mkdir(parents=True)
    (folder / "demo_infer" / "config.pbtxt").write_text(TWIN)
    with serving_demo(folder, CONFIG, "--allow-faults", variables=slowed) as server:
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


# --- outputs and texts --------------------------------------------------------------------------------------------


def test_logprobs_are_null_unless_they_are_asked_for_twice(server: Server) -> None:
    flags = {"return_logprobs": True, "return_cumulative_logprob": True}
    for stream in (False, True):
        for result in grpc_stream(server, grpc_inputs("A tuple is", stream=stream, max_tokens=4, **flags)):
            assert result.as_numpy("logprobs").tolist() == [b"null"]
            assert result.as_numpy("cumulative_logprob")[0] < 0.0
    answer = ask(server, "demo_infer", text_input="A tuple is", n=2, return_logprobs=True)
    assert answer["logprobs"] == ["null", "null"]


def test_ranks(server: Server) -> None:
    """The chosen token comes first, with its place among the likeliest if it has one."""
    parameters = json.dumps({"logprobs": 2, "seed": 3, "temperature": 2.0})
    answer = ask(server, text_input="A tuple is", sampling_parameters=parameters, max_tokens=40, return_logprobs=True)
    entries = [list(entry.values()) for entry in json.loads(answer["logprobs"])]
    for chosen, *others in entries:
        assert {1, 2} <= {chosen["rank"], *(other["rank"] for other in others)}
        assert len(others) == (1 if chosen["rank"] <= 2 else 2)
        assert all((other["logprob"] >= chosen["logprob"]) == (other["rank"] < chosen["rank"]) for other in others)
    assert {len(entry) for entry in entries} == {2, 3}


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (
            {"stream": True, "exclude_input_in_output": False},
            "[TW-INPUT] Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
        (
            {"sampling_parameters": '{"lora_name": "doll"}'},
            "[TW-UNSUPPORTED] LoRA feature is not enabled. Set enable_lora to true",
        ),
    ],
    ids=["stream", "lora"],
)
def test_texts_that_clients_compare_follow_the_tag(server: Server, tensors: dict[str, Any], text: str) -> None:
    with pytest.raises(StreamError) as error:
        grpc_stream(server, grpc_inputs("Hello", **tensors))
    assert str(error.value) == text


# --- numbers and names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"max_tokens": 2**31}, "[TW-INPUT] max_tokens arrived as -2147483648, and takes nothing below -1"),
        ({"top_k": 2**31}, "[TW-INPUT] top_k arrived as -2147483648, and takes nothing below -1"),
        ({"priority": 9}, "[TW-INPUT] priority is 9: it must be 0 (default) to 4 (lowest)"),
        ({"timeout": 5_000_000}, "[TW-UNSUPPORTED] timeout is 5000000: Triton's timeout is a field of"),
        ({"user": "me"}, "[TW-UNSUPPORTED] user is 'me': there are no users: use tenant"),
        ({"model": "demo"}, "[TW-UNSUPPORTED] model is 'demo': the address"),
        ({"image": ["iVBORw0KGgo="]}, "[TW-UNSUPPORTED] image is ['iVBORw0KGgo=']: images are not offered"),
        ({"parameters": {"user": "me"}}, "[TW-UNSUPPORTED] user is 'me'"),
    ],
    ids=str,
)
def test_values_that_are_named(server: Server, body: dict[str, Any], error: str) -> None:
    response = server.post("demo/generate", {"text_input": "Hello", **body})
    assert response.status_code == 400
    assert response.json()["error"].startswith(error)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"parameters": {"max_new_tokens": "4", "deadline_ms": "60000"}}, 4),
        ({"sampling_parameters": '{"max_tokens": "4", "seed": -1, "temperature": "0.5", "top_k": null}'}, 4),
        ({"sampling_parameters": '{"max_tokens": 4294967300}'}, None),
        ({"max_tokens": 4294967300}, 4),  # Triton narrows it to the INT32 of the tensor
    ],
    ids=str,
)
def test_numbers_and_how_they_travel(server: Server, body: dict[str, Any], count: int | None) -> None:
    if count is None:
        assert "max_tokens is 4294967300" in server.post("demo/generate", {"text_input": "Hi", **body}).text
    else:
        assert length(ask(server, text_input="A tuple is", **body)) == count


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"max_tokens": "4"}, 500, "attempt to access JSON non-signed-integer as signed-integer"),
        ({"max_tokens": 1.5}, 500, "attempt to access JSON non-signed-integer as signed-integer"),
        ({"max_tokens": None}, 500, "attempt to access JSON non-signed-integer as signed-integer"),
        ({"parameters": {"max_tokens": "4"}}, 500, "Converting keyword: 'parameters': Unable to parse 'data'"),
        ({"seed": -1}, 500, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"temperature": "0.5"}, 500, "attempt to access JSON non-number as double"),
        ({"ignore_eos": "true"}, 500, "attempt to access JSON non-boolean as boolean"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, 500, "attempt to access JSON non-string as string"),
        ({"session_id": None}, 400, "parameter 'session_id' has invalid type"),
        ({"response_format": {"type": "text"}}, 400, "parameter 'response_format' has invalid type"),
    ],
    ids=str,
)
def test_what_triton_refuses_by_itself(server: Server, body: dict[str, Any], status: int, error: str) -> None:
    """As docs/clients.md says of server 2.51: none of it reaches the model."""
    response = server.post("demo/generate", {**({} if "messages" in body else {"text_input": "Hello"}), **body})
    assert response.status_code == status
    assert error in response.json()["error"]
    assert "[TW-" not in response.text


# --- clients that hang up -----------------------------------------------------------------------------------------

# Of nobody's patience: it would go on for many seconds.
ENDLESS = {"text_input": "The server", "max_tokens": 2000, "ignore_eos": True, "n": 16}
TENSORS = [("text_input", "BYTES", "The server"), ("max_tokens", "INT32", 2000), ("ignore_eos", "BOOL", True)]
INFER = {
    "inputs": [{"name": name, "datatype": kind, "shape": [1], "data": [value]} for name, kind, value in TENSORS],
    "parameters": {"n": 16},
}


def hang_up(server: Server, path: str, body: dict[str, Any]) -> None:
    """Send a request, see it run, and close the connection."""
    data = json.dumps(body).encode()
    head = f"POST /v2/models/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.http_port)) as connection:
        connection.sendall(head.encode() + data)
        wait_for(lambda: server.metric("vllm:num_requests_running") > 0, 60, "a running request")


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [("demo", "demo/generate", ENDLESS), ("demo_infer", "demo_infer/infer", INFER)],
    ids=["generate", "infer"],
)
def test_a_request_whose_client_hung_up_ends_in_time(
    bounded: Server, model: str, path: str, body: dict[str, Any]
) -> None:
    """Nothing in this server tells of it, but `max_request_s` frees its blocks."""

    def num_ended(reason: str) -> float:
        return bounded.metric("vllm:request_success_total", model_name=model, finished_reason=reason)

    before = num_ended("length"), num_ended("deadline")
    hang_up(bounded, path, body)
    wait_for(lambda: bounded.metric("vllm:kv_cache_usage_perc") == 0, 60, "all blocks given back")
    wait_for(lambda: num_ended("deadline") == before[1] + 1, 60, "the end in the metrics")
    assert num_ended("length") == before[0]
