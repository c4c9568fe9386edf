"""What a request looks like on the wire, and what its answer becomes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from support.triton.grpc_triton import Answer, Asked, FakeTriton, response
from tidewheel_client import (
    Chunk,
    Client,
    InternalError,
    InvalidRequest,
    LoraState,
    NotFound,
    PerfMetrics,
    TokenLogprob,
)
from tidewheel_client.response_codec import chunks_of

PERF = {
    "num_cached_tokens": 48,
    "arrival_time_ns": 1,
    "first_scheduled_time_ns": 2,
    "first_token_time_ns": 3,
    "last_token_time_ns": 2**40,
    "kv_cache_reused_blocks": 5,
    "kv_cache_alloc_new_blocks": 6,
    "priority": 3,
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


@pytest.mark.parametrize("priority", [2, "high", "HIGH"])
def test_triton_s_queue_sees_the_class(client: Client, triton: FakeTriton, priority: object) -> None:
    client.generate("x", priority=priority)
    (asked,) = triton.asked
    assert (asked.sampling["priority"], asked.message.parameters["priority"].uint64_param) == (priority, 2)


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


def test_logprobs_that_were_not_asked_for_are_none(client: Client, triton: FakeTriton) -> None:
    triton.answer = lambda asked: _final(asked, None)
    assert next(client.stream("x", return_logprobs=True)).logprobs is None


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


@pytest.mark.parametrize("newer", [{}, {"weights": "mixed", "num_draft_tokens": 8, "num_accepted_draft_tokens": 6}])
def test_figures_of_an_older_server_are_fewer(newer: dict[str, Any]) -> None:
    (chunk,) = chunks_of({"text_output": ("x",), **{name: (value,) for name, value in {**PERF, **newer}.items()}})
    assert chunk.perf == PerfMetrics(**PERF, **newer)


def test_request_ids_are_made_up_when_absent(client: Client, triton: FakeTriton) -> None:
    first, second = client.stream("x"), client.stream("x")
    list(first), list(second)
    assert first.request_id != second.request_id
    assert {asked.message.id for asked in triton.asked} == {first.request_id, second.request_id}


def test_headers_go_with_every_call(triton: FakeTriton) -> None:
    with Client(f"127.0.0.1:{triton.port}", headers=[("authorization", "Bearer t")]) as client:
        client.generate("x")
    assert triton.asked[0].metadata["authorization"] == "Bearer t"


# --- how requests are served --------------------------------------------------------------------------------------


def queue_fields(asked: Asked) -> dict[str, int]:
    fields = asked.message.parameters
    return {name: fields[name].uint64_param or fields[name].int64_param for name in fields}


def test_how_a_request_is_served(client: Client, triton: FakeTriton) -> None:
    params = {"priority": 1, "tenant": "acme", "deadline_ms": 1500.5, "session_id": "s", "session_ttl_s": 60}
    client.generate("x", **params)
    assert triton.asked[0].sampling == params
    assert queue_fields(triton.asked[0]) == {"priority": 1, "timeout": 1_500_500}


@pytest.mark.parametrize(
    "params",
    [{}, {"priority": 0}, {"priority": "1", "deadline_ms": "5"}, {"deadline_ms": -1}, {"deadline_ms": 1e300}],
)
def test_what_triton_could_not_read_is_left_to_the_model(
    client: Client, triton: FakeTriton, params: dict[str, object]
) -> None:
    client.generate("x", **params)
    assert queue_fields(triton.asked[0]) == {}
    assert triton.asked[0].sampling == params


def _two_sequences(asked: Asked) -> Answer:
    def one(texts: list[str], reasons: list[str], counts: list[int], ids: list[int]) -> Any:
        return response(
            asked.message,
            text_output=texts,
            finish_reason=reasons,
            num_input_tokens=("UINT32", "I", [7]),
            num_output_tokens=("UINT32", "I", counts),
            token_ids=("INT32", "i", ids),
        )

    yield one(["a", "x"], ["None", "None"], [1, 2], [5, 6, 7])
    yield one(["b", ""], ["length", "None"], [1, 0], [8])
    yield one(["", "y"], ["length", "stop"], [0, 1], [9])


def test_sequences_arrive_by_index(client: Client, triton: FakeTriton) -> None:
    triton.answer = _two_sequences
    stream = client.stream("x", n=2, return_token_ids=True)
    chunks = [next(stream) for _ in range(3)]
    assert stream.finish_reason is None
    chunks += stream
    assert [(chunk.index, chunk.text, chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
        (0, "a", (5,), None), (1, "x", (6, 7), None), (0, "b", (8,), "length"), (1, "y", (9,), "stop"),
    ]  # fmt: skip
    assert stream.finish_reason == "stop"
    assert triton.asked[0].sampling == {"n": 2}


def test_all_sequences_of_an_answer(client: Client, triton: FakeTriton) -> None:
    triton.answer = _two_sequences
    first, second = client.generate_all("x", n=2, return_token_ids=True, return_num_output_tokens=False)
    assert (first.index, first.text, first.finish_reason, first.token_ids) == (0, "ab", "length", (5, 8))
    assert (second.index, second.text, second.finish_reason, second.token_ids) == (1, "xy", "stop", (6, 7, 9))
    assert second.num_output_tokens == 3
    assert triton.asked[0].inputs["return_num_output_tokens"] is True
    with pytest.raises(InvalidRequest, match="generate_all"):
        client.generate("x", n=2)
    with pytest.raises(InvalidRequest, match=r"2 sequences.*read_all"):
        client.stream("x", n=2).read()
    triton.answer = None
    assert [completion.text for completion in client.generate_all("one two")] == ["one two"]


def test_closing_a_session(client: Client, triton: FakeTriton) -> None:
    triton.answer = lambda asked: iter([response(asked.message, text_output="", finish_reason="stop")])
    client.close_session("s", tenant="acme")
    (asked,) = triton.asked
    assert asked.sampling == {"close_session": True, "session_id": "s", "tenant": "acme"}
    assert asked.inputs["text_input"] == ""


def test_orders_about_adapters(client: Client, triton: FakeTriton) -> None:
    client.load_lora("sql", "adapters/sql")
    assert triton.loras["demo"].pop("sql") == "adapters/sql"
    triton.loras["demo"] = {"fr": "/loras/fr"}
    assert client.list_loras() == [LoraState("fr", "/loras/fr")]
    client.unload_lora("fr")
    with pytest.raises(NotFound, match="no adapter 'fr'"):
        client.unload_lora("fr")
    assert [order["lora_order"] for order in triton.lora_orders] == ["load", "list", "unload", "unload"]
    assert client.list_loras() == []
    triton.loras["demo"] = {"fr": 5}  # type: ignore[dict-item]
    with pytest.raises(InternalError, match="list of adapters cannot be read"):
        client.list_loras()


def test_pausing_a_session(client: Client, triton: FakeTriton) -> None:
    triton.answer = lambda asked: iter([response(asked.message, text_output="", finish_reason="stop")])
    client.session("s", tenant="acme").pause(["search"])
    (asked,) = triton.asked
    assert asked.sampling == {"pause_session": ["search"], "session_id": "s", "tenant": "acme"}
    assert asked.inputs["text_input"] == ""


def _final(asked: Asked, logprobs: object = ()) -> Answer:
    yield response(
        asked.message,
        text_output="ab",
        finish_reason="length",
        token_ids=("INT32", "i", [5, 6]),
        num_output_tokens=("UINT32", "I", [2]),
        cumulative_logprob=("FP32", "f", [-1.25]),
        logprobs=json.dumps(logprobs),
        **{name: ("INT32", "i", [v]) if name.startswith("kv") else ("INT64", "q", [v]) for name, v in PERF.items()},
    )
