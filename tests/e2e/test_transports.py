"""The same greedy tokens through every door of the server, equal to transformers' token for token."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from support.triton.serving import Server, grpc_inputs, grpc_stream, sse_events, texts, token_ids

pytestmark = pytest.mark.e2e

Reference = Callable[[str, int], tuple[list[int], list[int], str]]

PROMPT = "The Python interpreter is"
GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "max_tokens": 40}


def test_grpc_stream(server: Server, reference: Reference) -> None:
    _, expected, text = reference(PROMPT, 40)
    results = grpc_stream(server, grpc_inputs(PROMPT, stream=True, return_token_ids=True, **GREEDY), request_id="r7")
    assert token_ids(results) == expected
    assert "".join(texts(results)) == text
    assert {result.get_response().id for result in results} == {"r7"}
    assert len(results) > 1


def test_final_flag_rides_on_the_last_data_response(server: Server) -> None:
    results = grpc_stream(server, grpc_inputs(PROMPT, stream=True, return_finish_reason=True, **GREEDY))
    flags = [result.get_response().parameters["triton_final_response"].bool_param for result in results]
    assert flags == [False] * (len(results) - 1) + [True]
    reasons = [result.as_numpy("finish_reason")[0].decode() for result in results]
    assert reasons == ["None"] * (len(results) - 1) + ["length"]


def test_grpc_stream_from_ids(server: Server, reference: Reference) -> None:
    prompt_ids, expected, _ = reference(PROMPT, 40)
    inputs = grpc_inputs(input_ids=prompt_ids, stream=True, return_token_ids=True, **GREEDY)
    assert token_ids(grpc_stream(server, inputs)) == expected


def test_grpc_without_streaming_prepends_the_prompt(server: Server, reference: Reference) -> None:
    _, expected, text = reference(PROMPT, 40)
    results = grpc_stream(server, grpc_inputs(PROMPT, stream=False, return_token_ids=True, **GREEDY))
    assert len(results) == 1
    assert texts(results) == [PROMPT + text]
    assert token_ids(results) == expected


def test_sampling_parameters_as_json(server: Server, reference: Reference) -> None:
    _, expected, _ = reference(PROMPT, 40)
    parameters = json.dumps({**GREEDY, "max_tokens": "40"})
    inputs = grpc_inputs(PROMPT, stream=True, return_token_ids=True, sampling_parameters=parameters)
    assert token_ids(grpc_stream(server, inputs)) == expected


def test_request_parameters(server: Server, reference: Reference) -> None:
    _, expected, _ = reference(PROMPT, 40)
    parameters = {"temperature": "0", "repetition_penalty": "1.0", "ignore_eos": True, "max_new_tokens": "40"}
    inputs = grpc_inputs(PROMPT, stream=True, return_token_ids=True)
    assert token_ids(grpc_stream(server, inputs, parameters=parameters)) == expected


def test_http_generate(server: Server, reference: Reference) -> None:
    _, expected, text = reference(PROMPT, 40)
    answer = server.generate(PROMPT, exclude_input_in_output=True, return_token_ids=True, **GREEDY)
    assert answer["text_output"] == text
    assert answer["token_ids"] == expected


def test_http_generate_stream(server: Server, reference: Reference) -> None:
    _, expected, text = reference(PROMPT, 40)
    body = {"text_input": PROMPT, "stream": True, "return_token_ids": True, **GREEDY}
    response = server.post("demo/generate_stream", body, stream=True)
    assert response.status_code == 200
    events = sse_events(response)
    assert "".join(event["text_output"] for event in events) == text
    tokens = [event["token_ids"] for event in events]
    assert [t for part in tokens for t in (part if isinstance(part, list) else [part])] == expected


def test_http_infer_on_the_twin(server: Server, reference: Reference) -> None:
    _, expected, text = reference(PROMPT, 40)
    body = {
        "inputs": [
            {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]},
            {"name": "sampling_parameters", "shape": [1], "datatype": "BYTES", "data": [json.dumps(GREEDY)]},
            {"name": "exclude_input_in_output", "shape": [1], "datatype": "BOOL", "data": [True]},
            {"name": "return_token_ids", "shape": [1], "datatype": "BOOL", "data": [True]},
        ]
    }
    response = server.post("demo_infer/infer", body)
    assert response.status_code == 200, response.text
    outputs = {output["name"]: output["data"] for output in response.json()["outputs"]}
    assert outputs["text_output"] == [text]
    assert outputs["token_ids"] == expected


def test_unary_grpc_on_the_twin(server: Server, reference: Reference) -> None:
    _, expected, text = reference(PROMPT, 40)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        inputs = grpc_inputs(PROMPT, exclude_input_in_output=True, return_token_ids=True, **GREEDY)
        result = client.infer("demo_infer", inputs)
    assert token_ids([result]) == expected
    assert texts([result]) == [text]


def test_a_seed_gives_the_same_text_whatever_else_runs(server: Server) -> None:
    sampled = {"temperature": 1.0, "seed": 17, "max_tokens": 30, "ignore_eos": True}
    alone = server.generate(PROMPT, **sampled)["text_output"]
    with grpcclient.InferenceServerClient(server.grpc) as client:
        others = [client.async_infer("demo_infer", grpc_inputs("A", max_tokens=60), callback=lambda *_: None)]
        others += [client.async_infer("demo_infer", grpc_inputs("B", max_tokens=60), callback=lambda *_: None)]
        assert server.generate(PROMPT, **sampled)["text_output"] == alone
    assert server.generate(PROMPT, **{**sampled, "seed": 18})["text_output"] != alone


def test_stop_string_is_cut_exactly(server: Server, reference: Reference) -> None:
    _, _, text = reference(PROMPT, 40)
    stop = text[20:26]
    answer = server.generate(
        PROMPT, exclude_input_in_output=True, return_finish_reason=True, stop_words=[stop], **GREEDY
    )
    assert answer["text_output"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"


def test_counts_logprobs_and_perf(server: Server, reference: Reference) -> None:
    prompt_ids, expected, _ = reference(PROMPT, 40)
    answer = server.generate(
        PROMPT,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_logprobs=True,
        return_cumulative_logprob=True,
        return_perf_metrics=True,
        sampling_parameters=json.dumps({"logprobs": 3}),
        **GREEDY,
    )
    assert answer["num_input_tokens"] == len(prompt_ids)
    assert answer["num_output_tokens"] == 40
    logprobs = json.loads(answer["logprobs"])
    assert [next(iter(entry)) for entry in logprobs] == [str(token) for token in expected]
    chosen = [entry[str(token)] for entry, token in zip(logprobs, expected, strict=True)]
    assert all(one["rank"] == 1 for one in chosen)
    assert answer["cumulative_logprob"] == pytest.approx(sum(one["logprob"] for one in chosen), rel=1e-4)
    times = [
        answer[name]
        for name in ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    ]
    assert times == sorted(times)
    assert times[0] > 0


def test_chat_messages(server: Server) -> None:
    messages = json.dumps([{"role": "user", "content": "What is a tuple?"}])
    results = grpc_stream(server, grpc_inputs(messages=messages, stream=True, max_tokens=20))
    assert "".join(texts(results)).strip()
