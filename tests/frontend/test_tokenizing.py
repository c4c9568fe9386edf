"""Requests that the tokenizer alone answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from support.engine.fake_engine import RecordingSink
from support.frontend.front_ends import FrontendHarness, prompt_ids
from tidewheel.frontend.tokenizer import Tokenizer

CHAT = json.dumps([{"role": "user", "content": "the fox"}])
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[FrontendHarness]:
    harness = FrontendHarness(tmp_path, max_prompt_bytes=1 << 20, template=TEMPLATE)
    yield harness
    harness.close()


def answer(harness: FrontendHarness, **asked: Any) -> str:
    sink: RecordingSink = harness.submit_at_now(**asked)
    sink.wait_end()
    assert sink.error is None, sink.error
    (response,) = sink.responses
    (chunk,) = response
    assert chunk.finish_reason == "stop"
    return chunk.text


def tokenize(harness: FrontendHarness, **asked: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer(harness, task="tokenize", **asked))
    return found


def test_tokens_and_text(harness: FrontendHarness) -> None:
    ids = harness.encode("the fox")
    found = tokenize(harness, text="the fox")
    assert found == {
        "count": len(ids), "max_model_len": harness.info.max_model_len, "tokens": ids, "token_strs": None,
    }  # fmt: skip
    strings = tokenize(harness, text="the fox", parameters={"return_token_strs": True})["token_strs"]
    assert "".join(strings) == "theĠfox"
    assert answer(harness, task="detokenize", text=None, input_ids=np.array(ids, np.int32)) == "the fox"
    assert not harness.engine.added
    assert harness.frontend.stats().finished["stop"]


def test_a_text_longer_than_the_context(harness: FrontendHarness) -> None:
    assert tokenize(harness, text="fox " * 20_000)["count"] > harness.info.max_model_len


def test_special_tokens_are_meant_in_a_text_alone(harness: FrontendHarness) -> None:
    (end,) = harness.encode("</s>")
    messages = json.dumps([{"role": "user", "content": "the</s>fox"}])
    assert end in tokenize(harness, text="the</s>fox")["tokens"]
    assert end not in tokenize(harness, text=None, messages=messages)["tokens"]
    key, _ = harness.submit(messages=messages)
    assert end not in prompt_ids(harness.message(key))


def test_messages(harness: FrontendHarness) -> None:
    whole = tokenize(harness, text=None, messages=CHAT)
    assert whole["tokens"] == harness.encode("the fox!")
    bare = tokenize(harness, text=None, messages=CHAT, parameters={"add_generation_prompt": False})
    assert bare["tokens"] == harness.encode("the fox")


def test_prompts_of_the_engine_have_the_same_options(harness: FrontendHarness) -> None:
    key, _ = harness.submit(messages=CHAT, parameters={"add_generation_prompt": False})
    assert prompt_ids(harness.message(key)) == harness.encode("the fox")


def test_an_embedding(harness: FrontendHarness) -> None:
    key, sink = harness.submit("the fox", task="embed", parameters={"cache_salt": "x"})
    message = harness.message(key)
    assert (message.pooling, message.sampling.max_tokens, message.options.n) == ("last", 1, 1)
    harness.deliver(key, [9], "length", pooled=np.array([3, 0, -4], "<f4").tobytes())
    sink.wait_end()
    ((chunk,),) = sink.responses
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", [], "stop")
    assert chunk.embedding is not None
    assert chunk.embedding.tolist() == pytest.approx([0.6, 0, -0.8])
    assert chunk.num_input_tokens == len(harness.encode("the fox"))


def test_an_embedding_makes_no_text_of_its_prompt(harness: FrontendHarness) -> None:
    with mock.patch.object(Tokenizer, "decode", autospec=True, side_effect=Tokenizer.decode) as decode:
        key, sink = harness.submit(input_ids=np.full(200, 65, np.int32), task="embed", echo=True)
        harness.deliver(key, [9], "length", pooled=np.ones(3, "<f4").tobytes())
        sink.wait_end()
    assert sink.chunks[-1].embedding is not None
    assert all(len(call.args[1]) < 200 for call in decode.call_args_list)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"task": "tokenize", "text": "x", "parameters": {"max_tokens": 5}}, "max_tokens does not go with the task"),
        ({"task": "tokenize", "text": "x", "parameters": {"made_up": 5}}, "unknown parameter 'made_up'"),
        ({"task": "tokenize"}, "give one of text_input"),
        (
            {"task": "embed", "text": "x", "parameters": {"max_tokens": 5}},
            "max_tokens does not go with the task embed",
        ),
        (
            {"task": "tokenize", "text": "x", "parameters": {"guided_regex": "a"}},
            "guided_regex does not go with the task tokenize",
        ),
        ({"task": "embed", "text": "x", "parameters": {"n": 2}}, "n does not go with the task embed"),
        ({"task": "embed", "text": "x", "parameters": {"echo": True}}, "echo does not go with the task embed"),
        ({"task": "embed", "text": ""}, "text_input is empty"),
        ({"task": "tokenize", "input_ids": np.array([1], np.int32)}, "it takes text_input or messages"),
        ({"task": "detokenize", "text": "x"}, "it takes input_ids"),
        ({"task": "detokenize", "input_ids": np.array([3, -1], np.int32)}, "token id -1 at position 1"),
        ({"text": "x", "parameters": {"return_token_strs": True}}, "it goes with the task tokenize"),
        ({"text": "x", "parameters": {"add_generation_prompt": False}}, "it goes with messages"),
        ({"input_ids": np.array([1], np.int32), "parameters": {"add_special_tokens": True}}, "leave it out"),
    ],
)
def test_refusals(harness: FrontendHarness, asked: dict[str, Any], message: str) -> None:
    assert message in harness.refuse(**asked)
