"""What a request looks like on the wire, and what its answer becomes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from support.grpc_triton import Answer, Asked, FakeTriton, response
from tidewheel_client import Chunk, Client, InvalidRequest, PerfMetrics, TokenLogprob

PERF = {
    "arrival_time_ns": 1,
    "first_scheduled_time_ns": 2,
    "first_token_time_ns": 3,
    "last_token_time_ns": 2**40,
    "kv_cache_reused_blocks": 5,
    "kv_cache_alloc_new_blocks": 6,
}


def test_chunks_arrive_one_by_one(client: Client) -> None:
    stream = client.stream("one two")
    assert next(stream) == Chunk(text="one ", num_input_tokens=7, num_output_tokens=1)
    assert stream.finish_reason is None
    assert next(stream) == Chunk(text="two", finish_reason="stop", num_input_tokens=7, num_output_tokens=1)
    assert stream.finish_reason == "stop"
    assert list(stream) == []


def test_generate_joins_what_comes(client: Client) -> None:
    completion = client.generate("one two three", request_id="mine")
    assert completion.text == "one two three"
    assert completion.request_id == "mine"
    assert completion.finish_reason == "stop"
    assert completion.num_output_tokens == 3
    assert completion.num_input_tokens == 7
    assert completion.token_ids is None


def test_stream_flag_and_output_flags(client: Client, triton: FakeTriton) -> None:
    client.generate("x")
    list(client.stream("x", return_token_ids=True, return_num_input_tokens=False))
    one, many = triton.asked
    assert one.inputs == {
        "text_input": "x",
        "stream": False,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    assert many.inputs["stream"] is True
    assert many.inputs["return_token_ids"] is True
    assert "return_num_input_tokens" not in many.inputs


def test_sampling_keys_travel_as_json(client: Client, triton: FakeTriton) -> None:
    client.generate("x", max_tokens=5, temperature=0.5, stop=["a", "é"], logit_bias={3: 1.5}, made_up=True)
    assert triton.asked[0].sampling == {
        "max_tokens": 5,
        "temperature": 0.5,
        "stop": ["a", "é"],
        "logit_bias": {"3": 1.5},
        "made_up": True,
    }


def test_other_prompts(client: Client, triton: FakeTriton) -> None:
    triton.answer = lambda asked: _final(asked)
    client.generate(input_ids=[1, 2, 2**31 - 1])
    client.generate(messages=[{"role": "user", "content": "hé"}])
    client.generate(messages='[{"role": "user"}]')
    ids, messages, text = triton.asked
    assert ids.inputs["input_ids"] == [1, 2, 2**31 - 1]
    assert list(ids.message.inputs[0].shape) == [3]
    assert json.loads(messages.inputs["messages"]) == [{"role": "user", "content": "hé"}]
    assert text.inputs["messages"] == '[{"role": "user"}]'


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "nothing"),
        ({"prompt": "x", "input_ids": [1]}, "text_input and input_ids"),
        ({"input_ids": [2**31]}, "int32"),
        ({"input_ids": ["x"]}, "int32"),
        ({"prompt": "x", "return_token_ids": "yes"}, "return_token_ids"),
        ({"prompt": "x", "stop": object()}, "JSON"),
    ],
)
def test_refused_before_anything_is_sent(
    client: Client, triton: FakeTriton, arguments: dict[str, Any], word: str
) -> None:
    with pytest.raises(InvalidRequest, match=word):
        client.generate(**arguments)
    assert triton.asked == []


def test_every_output_is_read(client: Client, triton: FakeTriton) -> None:
    logprobs = [
        {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
        {"6": {"logprob": None, "rank": 9, "decoded_token": "b"}},
    ]
    triton.answer = lambda asked: _final(asked, logprobs)
    chunk = next(client.stream("x", return_logprobs=True, return_perf_metrics=True))
    assert chunk.token_ids == (5, 6)
    assert chunk.num_output_tokens == 2
    assert chunk.cumulative_logprob == pytest.approx(-1.25)
    assert chunk.logprobs == (
        {5: TokenLogprob(logprob=-0.5, rank=1, decoded_token="a")},
        {6: TokenLogprob(logprob=-math.inf, rank=9, decoded_token="b")},
    )
    assert chunk.perf == PerfMetrics(**PERF)


def test_request_ids_are_made_up_when_absent(client: Client, triton: FakeTriton) -> None:
    first, second = client.stream("x"), client.stream("x")
    list(first), list(second)
    assert first.request_id != second.request_id
    assert {asked.message.id for asked in triton.asked} == {first.request_id, second.request_id}


def test_headers_go_with_every_call(triton: FakeTriton) -> None:
    with Client(f"127.0.0.1:{triton.port}", headers=[("authorization", "Bearer t")]) as client:
        client.generate("x")
    assert triton.asked[0].metadata["authorization"] == "Bearer t"


def _final(asked: Asked, logprobs: Sequence[object] = ()) -> Answer:
    yield response(
        asked.message,
        text_output="ab",
        finish_reason="length",
        token_ids=("INT32", "i", [5, 6]),
        num_output_tokens=("UINT32", "I", [2]),
        cumulative_logprob=("FP32", "f", [-1.25]),
        logprobs=json.dumps(list(logprobs)),
        **{name: ("INT32", "i", [v]) if name.startswith("kv") else ("INT64", "q", [v]) for name, v in PERF.items()},
    )
