"""Greedy streams that go on at another server: which ones, from where, and without a word twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from support.gateway.running_gateway import RunningGateway, events, gateway_to, perf, uints
from support.triton.grpc_triton import Answer, Asked, FakeTriton, Refused, response, running
from tidewheel.gateway import bodies
from tidewheel.gateway.continuing import Written, may_go_on
from tidewheel_client import Chunk

PROMPT = [1, 2, 3]
GREEDY = {"temperature": 0, "max_tokens": 12, "stream": True}
# Each token's text. Those of 14 and 15 are one character together.
WORDS = {10: "a", 11: " b", 12: " c", 13: " d", 14: "", 15: "é", 16: " e"}
IDS = list(WORDS)


def write(asked: Asked, first: int, sizes: Sequence[int] = (1,) * 7) -> Answer:
    """Answer with the tokens from the `first` on, in chunks of these sizes."""
    left = IDS[first:]
    num_input = len(asked.inputs["input_ids"])
    for size in sizes:
        ids, left = left[:size], left[size:]
        if not ids:
            return
        yield response(
            asked.message,
            text_output="".join(WORDS[one] for one in ids),
            finish_reason="None" if left else "stop",
            num_input_tokens=uints(num_input),
            num_output_tokens=uints(len(ids)),
            token_ids=("INT32", "i", ids),
            **({} if left else perf(num_input)),
        )


def lose(asked: Asked, sizes: Sequence[int]) -> Answer:
    yield from write(asked, 0, sizes)
    raise Refused(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def go_on(asked: Asked) -> Answer:
    """Answer as a model does: by the tokens that the prompt ends with."""
    if asked.inputs.get("task") == "tokenize":
        yield response(asked.message, text_output=json.dumps({"count": 3, "tokens": PROMPT}), finish_reason="stop")
        return
    ids = asked.inputs["input_ids"]
    assert ids == PROMPT + IDS[: len(ids) - 3]
    yield from write(asked, len(ids) - 3)


@pytest.fixture
def tritons() -> Iterator[tuple[FakeTriton, FakeTriton]]:
    with running(FakeTriton(answer=go_on)) as one, running(FakeTriton(answer=go_on)) as other:
        yield one, other


@pytest.fixture
def gateway(tritons: tuple[FakeTriton, FakeTriton]) -> Iterator[RunningGateway]:
    with gateway_to(*(one.port for one in tritons), continue_greedy=True) as running_gateway:
        yield running_gateway


@pytest.mark.parametrize("sizes", [(), (1,), (1, 1, 2), (4,), (1,) * 5, (1, 4), (1,) * 6, (6,)])
def test_a_text_goes_on_without_a_word_twice(
    gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton], sizes: tuple[int, ...]
) -> None:
    tritons[0].answer = lambda asked: lose(asked, sizes)
    include = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    answer = gateway.complete(PROMPT, **GREEDY, **include)
    *news, usage = events(answer)
    assert "".join(one["choices"][0]["text"] for one in news) == "a b c dé e"
    assert [token_id for one in news for token_id in one["choices"][0]["token_ids"]] == IDS
    assert [one["choices"][0]["finish_reason"] for one in news][-1] == "stop"
    assert usage["usage"]["prompt_tokens"] == 3
    assert usage["usage"]["completion_tokens"] == len(IDS)
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    metrics = gateway.get("/metrics").text
    assert f"tidewheel_gateway_continued_total {int(bool(sizes))}" in metrics


def test_a_limit_counts_what_came(gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]) -> None:
    tritons[0].answer = lambda asked: lose(asked, (1, 1))
    events(gateway.complete(PROMPT, **GREEDY, min_tokens=1, deadline_ms=60_000, priority=2))
    (asked,) = tritons[1].asked
    assert asked.sampling["max_tokens"] == 10
    assert asked.sampling["min_tokens"] == 0
    assert asked.sampling["deadline_ms"] < 60_000
    assert asked.sampling["priority"] == 2


def test_the_tokens_of_a_conversation_are_asked_for(
    gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    def begin(asked: Asked) -> Answer:
        yield response(
            asked.message,
            text_output="a",
            finish_reason="None",
            num_input_tokens=uints(3),
            num_output_tokens=uints(1),
            token_ids=("INT32", "i", [10]),
        )
        raise Refused(grpc.StatusCode.UNAVAILABLE, "[TW-ENGINE-DEAD] the engine died")

    tritons[0].answer = begin
    news = events(gateway.chat(**GREEDY, add_generation_prompt=True))
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in news) == "a b c dé e"
    tokenized, rest = tritons[1].asked
    assert tokenized.inputs["messages"] == tritons[0].asked[0].inputs["messages"]
    assert tokenized.sampling == {"add_generation_prompt": True}
    assert "add_generation_prompt" not in rest.sampling


def test_another_text_is_not_joined(gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]) -> None:
    """Tokens that are computed again must be those that the client has."""
    tritons[0].answer = lambda asked: lose(asked, (3,))
    tritons[1].answer = lambda asked: write(asked, 1)
    assert "TW-ENGINE-DEAD" in gateway.complete(PROMPT, **GREEDY).text


def test_the_loss_of_all_servers_is_told(gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]) -> None:
    for one in tritons:
        one.answer = lambda asked: lose(asked, (1,))
    assert "TW-ENGINE-DEAD" in gateway.complete(PROMPT, **GREEDY).text


def test_without_the_option_a_stream_ends(tritons: tuple[FakeTriton, FakeTriton]) -> None:
    tritons[0].answer = lambda asked: lose(asked, (1,))
    with gateway_to(*(one.port for one in tritons)) as gateway:
        assert "TW-ENGINE-DEAD" in gateway.complete(PROMPT, **GREEDY).text
    assert not tritons[1].asked


QUALIFYING: list[dict[str, Any]] = [
    {},
    {"top_p": 0.5, "seed": 3, "ignore_eos": True, "stop_token_ids": [4], "logit_bias": {"3": 1}},
    {"session_id": "a", "deadline_ms": 100, "priority": 1, "repetition_penalty": 1.1, "stop": []},
]
OTHERS: list[dict[str, Any]] = [
    {"stream": False},
    {"temperature": 0.5},
    {"temperature": None},
    {"temperature": False},
    {"max_tokens": None},
    {"max_tokens": True},
    {"min_tokens": "2"},
    {"n": 2},
    {"logprobs": 1},
    {"prompt_logprobs": 1},
    {"echo": True},
    {"stop": ["\n"]},
    {"bad_words": ["x"]},
    {"presence_penalty": 0.1},
    {"frequency_penalty": 0.1},
    {"truncate_prompt_tokens": 4},
    {"structured_outputs": {"regex": "a"}},
    {"guided_choice": ["a", "b"]},
    {"prompt": ["one", "two"]},
]


@pytest.mark.parametrize("fields", QUALIFYING)
def test_what_goes_on(fields: dict[str, Any]) -> None:
    assert may_go_on(bodies.read_completion({"prompt": "one", **GREEDY, **fields}))
    chat = {key: value for key, value in {**GREEDY, **fields}.items() if key != "max_tokens"}
    assert may_go_on(bodies.read_chat({"messages": [{"role": "user", "content": "one"}], **chat}))


@pytest.mark.parametrize("fields", OTHERS)
def test_what_does_not(fields: dict[str, Any]) -> None:
    given = {"prompt": "one", **GREEDY, **fields}
    assert not may_go_on(bodies.read_completion({key: value for key, value in given.items() if value is not None}))


def test_text_that_may_be_incomplete_is_computed_again() -> None:
    written = Written(max_tokens=6)
    for ids, text, num_whole in [
        ((1,), "a", 1),
        ((2,), "", 1),
        ((3,), "é", 3),
        ((4, 5), "b", 3),
        ((6,), "c", 3),  # the last that it may have: the next server must have one to write
    ]:
        written.add(Chunk(text=text, token_ids=ids))
        assert written.num_whole == num_whole
    assert written.text == "bc"
    assert written.token_ids == [1, 2, 3, 4, 5, 6]
