"""Every kind of tritonclient, and what other clients send, against the running server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio

from support.triton.client_tensors import make_inputs, texts
from support.triton.serving import Server, grpc_inputs, grpc_stream, sse_events, token_ids

pytestmark = pytest.mark.e2e

PROMPT = "The Python interpreter is"
GREEDY = {
    "text_input": texts(PROMPT.encode()),
    "max_tokens": np.array([12], np.int32),
    "temperature": np.array([0.0], np.float32),
    "repetition_penalty": np.array([1.0], np.float32),
    "ignore_eos": np.array([True]),
    "return_token_ids": np.array([True]),
}
BOTH = pytest.mark.parametrize("kind", ["http", "grpc"])
Reference = Callable[[str, int], tuple[list[int], list[int], str]]


@pytest.fixture
def expected(reference: Reference) -> list[int]:
    return reference(PROMPT, 12)[1]


def url(server: Server, kind: str) -> str:
    return server.grpc if kind == "grpc" else server.http.removeprefix("http://")


@BOTH
def test_infer(server: Server, expected: list[int], kind: str) -> None:
    module: ModuleType = getattr(tritonclient, kind)
    with module.InferenceServerClient(url(server, kind)) as client:
        result = client.infer("demo_infer", make_inputs(module, GREEDY))
    assert result.as_numpy("token_ids").tolist() == expected


def test_async_infer_over_http(server: Server, expected: list[int]) -> None:
    module = tritonclient.http
    with module.InferenceServerClient(url(server, "http"), concurrency=2) as client:
        running = [client.async_infer("demo_infer", make_inputs(module, GREEDY)) for _ in range(2)]
        assert [one.get_result().as_numpy("token_ids").tolist() for one in running] == [expected] * 2


@BOTH
def test_infer_with_asyncio(server: Server, expected: list[int], kind: str) -> None:
    module: ModuleType = getattr(tritonclient, kind).aio

    async def infer() -> Any:
        async with module.InferenceServerClient(url(server, kind)) as client:
            return await asyncio.gather(*(client.infer("demo_infer", make_inputs(module, GREEDY)) for _ in range(2)))

    assert [result.as_numpy("token_ids").tolist() for result in asyncio.run(infer())] == [expected] * 2


def test_a_stream_with_asyncio(server: Server, expected: list[int]) -> None:
    """The request of the vLLM backend's `samples/client.py`, which sends its parameters twice."""
    module = tritonclient.grpc.aio
    parameters = {"temperature": "0", "repetition_penalty": "1.0", "max_tokens": "12", "ignore_eos": True}
    arrays = {
        "text_input": texts(PROMPT.encode()),
        "stream": np.array([True]),
        "return_token_ids": np.array([True]),
        "sampling_parameters": texts(json.dumps(parameters).encode()),
    }

    async def requests() -> AsyncIterator[dict[str, Any]]:
        inputs = make_inputs(module, arrays)
        yield {"model_name": "demo", "inputs": inputs, "request_id": "7", "parameters": parameters}

    async def stream() -> list[Any]:
        async with module.InferenceServerClient(server.grpc) as client:
            return [answer async for answer in client.stream_infer(requests())]

    answers = asyncio.run(stream())
    assert [error for _, error in answers if error is not None] == []
    assert token_ids([result for result, _ in answers]) == expected
    assert {result.get_response().id for result, _ in answers} == {"7"}


@pytest.mark.parametrize("model", ["demo", "demo_infer"])
def test_what_litellm_sends(server: Server, model: str) -> None:
    body = {"text_input": PROMPT, "parameters": {"max_tokens": 8}, "stream": False}
    answer = server.post(f"{model}/generate", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text_output"].startswith(PROMPT)


def test_what_litellm_sends_for_a_stream(server: Server) -> None:
    body = {"text_input": PROMPT, "parameters": {"max_tokens": 8}, "stream": True}
    events = sse_events(server.post("demo/generate_stream", body, stream=True))
    assert "".join(event["text_output"] for event in events)


TENSORS: dict[str, Any] = {
    "max_tokens": 6, "min_tokens": 2, "temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "seed": 7,
    "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"10": -1.0},
    "stop": ["zz"], "stop_token_ids": [5, 6], "bad_words": ["the"], "ignore_eos": True, "logprobs": 2, "n": 2,
    "include_stop_str_in_output": True, "skip_special_tokens": False,
}  # fmt: skip


def test_every_sampling_parameter_travels_as_a_tensor(server: Server) -> None:
    seed = tritonclient.grpc.InferInput("seed", [1], "UINT64")
    seed.set_data_from_numpy(np.array([TENSORS["seed"]], np.uint64))
    others = {name: value for name, value in TENSORS.items() if name not in ("seed", "logit_bias")}
    tensors = grpc_inputs(PROMPT, return_logprobs=True, return_token_ids=True, **others)
    tensors += [seed, *grpc_inputs(logit_bias=json.dumps(TENSORS["logit_bias"]))]
    as_json = grpc_inputs(
        PROMPT, return_logprobs=True, return_token_ids=True, sampling_parameters=json.dumps(TENSORS)
    )
    for name in ("token_ids", "logprobs"):
        one, other = (grpc_stream(server, inputs)[-1].as_numpy(name).tolist() for inputs in (tensors, as_json))
        assert one == other
    assert len(one) == TENSORS["n"]


def test_lists_and_numbers_in_a_body(server: Server) -> None:
    body = {"stop_token_ids": [5, 6], "n": 2, "min_p": 0.1, "logit_bias": '{"10": -1.5}', "max_tokens": 4}
    assert len(server.generate(PROMPT, **body)["text_output"]) == 2
