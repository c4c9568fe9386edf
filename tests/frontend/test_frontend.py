"""The front end as a client and an engine see it."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from support.engine.fake_engine import TIMEOUT_S, RecordingSink
from support.frontend.front_ends import FrontendHarness, delta, error_info, logprobs, prompt_ids, stats
from support.triton.serving import wait_for
from tidewheel.batch import Int32Array
from tidewheel.engine.requests import check_request
from tidewheel.errors import Busy, EngineDead
from tidewheel.frontend import admission_gate, request_reader
from tidewheel.frontend.live_request import LiveRequest
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.request_reader import phrase_ids

CHAT = json.dumps([{"role": "user", "content": "Hi"}])


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[FrontendHarness]:
    harness = FrontendHarness(tmp_path)
    yield harness
    harness.close()


def ledger(harness: FrontendHarness) -> tuple[int, int]:
    """Received, and accounted for."""
    stats = harness.frontend.stats()
    ended = sum(sum(counts.values()) for counts in (stats.finished, stats.rejected, stats.failed))
    return stats.num_received, ended + len(harness.frontend._live)


# --- what the engine gets -----------------------------------------------------------------------------------------


def test_what_the_engine_gets(harness: FrontendHarness) -> None:
    parameters = {
        "max_tokens": 9, "stop": "x", "bad_words": ["fox"], "stop_token_ids": [5], "priority": 1, "cache_salt": "s",
        "temperature": 0,
    }  # fmt: skip
    key, _ = harness.submit("the fox", parameters=parameters)
    message = harness.message(key)
    assert prompt_ids(message) == harness.encode("the fox")
    assert message.sampling.max_tokens == 9
    assert message.sampling.stop == message.sampling.bad_words == ()
    assert message.stop_token_ids == (2, 5)
    encode = partial(harness.tokenizer.encode, add_special_tokens=False)
    assert message.bad_words_ids == phrase_ids("fox", encode, harness.info.vocab_size)
    assert (message.options.priority, message.options.cache_salt, message.sampling.temperature) == (1, "s", 0.0)


def test_defaults(tmp_path: Path) -> None:
    harness = FrontendHarness(tmp_path, temperature=0.7, eos_token_id=[1, 420])
    key, _ = harness.submit("the fox")
    assert harness.message(key).stop_token_ids == (1, 2)  # of all files, and none that the model cannot output
    key, _ = harness.submit("the fox", parameters={"ignore_eos": True})
    message = harness.message(key)
    assert check_request(message, harness.info).max_tokens == 256 - len(harness.encode("the fox"))
    assert message.sampling.temperature == 0.7
    assert (message.stop_token_ids, message.options.priority) == ((), 3)
    harness.close()


def test_a_chat(harness: FrontendHarness) -> None:
    key, sink = harness.submit(messages=CHAT, echo=True)
    assert prompt_ids(harness.message(key)) == harness.encode("<user>Hi\n<assistant>")
    harness.deliver(key, harness.encode("Hey"), "length")
    sink.wait_end()
    assert sink.text == "<user>Hi\n<assistant>Hey"


def test_token_ids_as_prompt(harness: FrontendHarness) -> None:
    ids = harness.encode("the fox")
    key, sink = harness.submit(input_ids=np.array(ids, dtype=np.int32), echo=True)
    assert prompt_ids(harness.message(key)) == ids
    harness.deliver(key, harness.encode(" jumps"), "length")
    sink.wait_end()
    assert sink.text == "the fox jumps"


# --- what the client gets -----------------------------------------------------------------------------------------


def test_one_response_per_token_when_it_keeps_up(harness: FrontendHarness) -> None:
    key, sink = harness.submit(stream=True)
    ids = harness.encode("the quick fox")
    for index, token_id in enumerate(ids, start=1):
        harness.deliver(key, [token_id])
        sink.wait_chunks(index)
    harness.deliver(key, [], "length", stats=stats())
    sink.wait_end()
    assert sink.text == "the quick fox"
    assert [len(chunk.token_ids) for chunk in sink.chunks] == [1] * len(ids) + [0]
    assert [chunk.finish_reason for chunk in sink.chunks] == [None] * len(ids) + ["length"]
    assert {chunk.num_input_tokens for chunk in sink.chunks} == {len(harness.encode("Hello"))}


def test_several_tokens_in_one_response_when_it_is_behind(harness: FrontendHarness) -> None:
    gate = threading.Event()
    key, sink = harness.submit(sink=RecordingSink(gate), stream=True)
    ids = harness.encode("the quick brown fox jumps over the lazy dog")
    for token_id in ids[:-1]:
        harness.deliver(key, [token_id])
    harness.deliver(key, ids[-1:], "length")
    gate.set()
    sink.wait_end()
    assert sink.text == "the quick brown fox jumps over the lazy dog"
    assert sink.token_ids == ids
    assert len(sink.chunks) <= 2


def test_a_blocked_client_holds_up_no_other(harness: FrontendHarness) -> None:
    gate = threading.Event()
    slow_key, slow = harness.submit(sink=RecordingSink(gate), stream=True)
    harness.deliver(slow_key, harness.encode("x"))
    for _ in range(8):
        submitted = harness.submit(stream=True)
        assert harness.finish(submitted, "the fox").text == "the fox"
    assert not slow.chunks
    gate.set()
    harness.deliver(slow_key, harness.encode("y"), "length")
    slow.wait_end()
    assert slow.text == "xy"


def test_without_streaming_there_is_one_response(harness: FrontendHarness) -> None:
    key, sink = harness.submit("the", echo=True)
    for token_id in (ids := harness.encode(" fox jumps")):
        harness.deliver(key, [token_id])
    harness.deliver(key, [2], "stop", stats=stats())
    sink.wait_end()
    (chunk,) = sink.chunks
    assert chunk.text == "the fox jumps"
    assert chunk.token_ids == [*ids, 2]  # what was sampled, the end token included
    assert chunk.finish_reason == "stop"
    assert chunk.stats == msgspec.structs.replace(stats(), arrival_ns=harness.message(key).arrival_ns)


def test_echo_is_not_for_streams(harness: FrontendHarness) -> None:
    assert harness.finish(harness.submit("the", stream=True, echo=True), " fox").text == " fox"


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one END")])
def test_a_stop_string_across_tokens(harness: FrontendHarness, include: bool, expected: str) -> None:
    key, sink = harness.submit(stream=True, parameters={"stop": ["END"], "include_stop_str_in_output": include})
    for char in "one END two":
        harness.deliver(key, harness.encode(char))
    sink.wait_end()
    assert sink.text == expected
    assert sink.finish_reason == "stop"
    assert len(sink.token_ids) == len("one END")
    harness.engine.wait_cancelled(key)
    harness.deliver(key, [], "cancelled")  # the engine's last word comes too late to matter
    assert sink.num_ends == 1


def test_a_token_that_comes_during_a_turn_is_not_forgotten(
    harness: FrontendHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its news came after the turn took the deltas and before it took the columns'."""
    key, sink = harness.submit(stream=True)
    columns = harness.frontend._columns
    take = columns.take

    def take_late(key: int, now_ns: int) -> list[int]:
        monkeypatch.setattr(columns, "take", take)
        harness.deliver(key, harness.encode("b"))
        return take(key, now_ns)

    monkeypatch.setattr(columns, "take", take_late)
    harness.deliver(key, harness.encode("a"))
    sink.wait_chunks(2)
    assert sink.text == "ab"
    harness.deliver(key, [], "length")
    sink.wait_end()


def test_tokens_behind_a_stop_string_are_not_output(harness: FrontendHarness) -> None:
    submitted = harness.submit(stream=True, parameters={"stop": ["END"], "logprobs": 0})
    ids = [token_id for char in "one END two" for token_id in harness.encode(char)]
    harness.deliver(submitted.key, ids, "length", logprobs=[logprobs(token_id, []) for token_id in ids])
    submitted.sink.wait_end()
    (chunk,) = submitted.sink.chunks
    assert (chunk.text, chunk.finish_reason) == ("one ", "stop")
    assert chunk.token_ids == ids[: len("one END")]
    assert len(chunk.logprobs or []) == len(chunk.token_ids)
    assert not harness.engine.cancelled  # it was at its end by itself


def test_what_was_held_back_comes_at_the_end(harness: FrontendHarness) -> None:
    submitted = harness.submit(stream=True, parameters={"stop": ["END"]})
    assert harness.finish(submitted, "one EN").text == "one EN"
    assert not harness.engine.cancelled


def test_a_stop_string_within_min_tokens(harness: FrontendHarness) -> None:
    key, sink = harness.submit(stream=True, parameters={"stop": ["b"], "min_tokens": 3})
    for char in "abcabc":
        harness.deliver(key, harness.encode(char))
    sink.wait_end()
    assert sink.text == "abca"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"stop_token_ids": [50]}, "xy"),
        ({"stop_token_ids": [50], "include_stop_str_in_output": True}, "xyQ"),
    ],
    ids=["hidden", "included"],
)
def test_the_text_of_a_stop_token(harness: FrontendHarness, parameters: dict[str, object], expected: str) -> None:
    (token_id,) = harness.encode("Q")
    key, sink = harness.submit(stream=True, parameters={**parameters, "stop_token_ids": [token_id]})
    harness.deliver(key, [*harness.encode("xy"), token_id], "stop")
    sink.wait_end()
    assert sink.text == expected
    assert sink.token_ids[-1] == token_id


def test_special_tokens_on_request(harness: FrontendHarness) -> None:
    for skip, expected in ((True, "xy"), (False, "x</s>y")):
        submitted = harness.submit(parameters={"skip_special_tokens": skip})
        harness.deliver(submitted.key, [*harness.encode("x"), 2, *harness.encode("y")], "length")
        submitted.sink.wait_end()
        assert submitted.sink.text == expected


def test_logprobs(harness: FrontendHarness) -> None:
    key, sink = harness.submit(stream=True, parameters={"logprobs": 2})
    a, b, c = (harness.encode(char)[0] for char in "abc")
    harness.deliver(key, [a, b], logprobs=[logprobs(a, [c]), logprobs(b, [a, c])])
    harness.deliver(key, [], "length")
    sink.wait_end()
    entries = [entry for chunk in sink.chunks for entry in chunk.logprobs or []]
    assert entries == [logprobs(a, [c]), logprobs(b, [a, c])]
    assert sink.chunks[0].token_texts[a] == "a" and sink.chunks[0].token_texts[c] == "c"
    assert {text for chunk in sink.chunks for text in chunk.token_texts.values()} == {"a", "b", "c"}
    assert sink.chunks[-1].cumulative_logprob == -3.0


def test_no_logprobs_unless_asked(harness: FrontendHarness) -> None:
    chunk = harness.finish(harness.submit(), "x").chunks[-1]
    assert chunk.logprobs is None
    assert chunk.cumulative_logprob is None


# --- refusals -----------------------------------------------------------------------------------------------------


def test_log_probabilities_of_the_prompt(harness: FrontendHarness) -> None:
    key, sink = harness.submit("the fox", stream=True, parameters={"prompt_logprobs": 1, "echo": True})
    ids = prompt_ids(harness.message(key))
    entries = [logprobs(token_id, [5]) for token_id in ids[1:]]
    harness.deliver(key, [9], prompt_logprobs=entries)
    harness.deliver(key, [9], "length")
    sink.wait_end()
    first, *others = sink.chunks
    assert first.text.startswith("the fox")
    assert (first.prompt_ids, first.prompt_logprobs) == (ids, entries)
    assert first.token_texts.keys() >= {*ids, 5}
    assert [chunk.prompt_logprobs for chunk in others] == [None] * len(others)
    assert "".join(chunk.text for chunk in others).count("the fox") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["the fox", "t"])
def test_a_prompt_is_scored_and_nothing_is_generated(harness: FrontendHarness, text: str, stream: bool) -> None:
    """The engine computes a token more than is asked for, which may end an answer."""
    parameters = {"max_tokens": 0, "echo": True, "prompt_logprobs": 0, "logprobs": 0}
    key, sink = harness.submit(text, stream=stream, parameters=parameters)
    ids = prompt_ids(harness.message(key))
    assert harness.message(key).sampling.max_tokens == 1
    entries = [logprobs(token_id, []) for token_id in ids[1:]]
    harness.deliver(key, [9], "stop", prompt_logprobs=entries, logprobs=[logprobs(9, [])])
    sink.wait_end()
    (chunk,) = sink.chunks
    assert (chunk.text, chunk.token_ids, chunk.logprobs, chunk.finish_reason) == (text, [], [], "length")
    assert (chunk.prompt_ids, chunk.prompt_logprobs) == (ids, entries)
    assert chunk.num_input_tokens == len(ids)


def test_no_tokens_without_a_look_at_the_prompt(harness: FrontendHarness) -> None:
    assert "max_tokens is 0: it must be" in harness.refuse(text="the", parameters={"max_tokens": 0, "logprobs": 0})
    key, sink = harness.submit("the fox", parameters={"max_tokens": 0, "echo": True})
    harness.deliver(key, [9], "length")
    sink.wait_end()
    assert [(chunk.text, chunk.prompt_logprobs) for chunk in sink.chunks] == [("the fox", None)]


@pytest.mark.parametrize(
    ("count", "max_tokens", "num_kept"), [(3, 5, 3), (-1, 50, 206), (-1, None, 255), (-1, 999, 255)]
)
def test_a_prompt_is_cut_to_its_last_tokens(
    harness: FrontendHarness, count: int, max_tokens: int | None, num_kept: int
) -> None:
    text = "the " * 300
    parameters = {"truncate_prompt_tokens": count, "max_tokens": max_tokens}
    submitted = harness.submit(text, parameters=parameters, echo=True)
    ids = harness.encode(text)[-num_kept:]
    assert prompt_ids(harness.message(submitted.key)) == ids
    sink = harness.finish(submitted, " fox")
    assert "".join(chunk.text for chunk in sink.chunks) == harness.tokenizer.decode(ids) + " fox"
    assert sink.chunks[-1].num_input_tokens == num_kept


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, ["TW-INPUT", "text_input", "input_ids", "messages"]),
        ({"text": "x", "messages": CHAT}, ["text_input and messages"]),
        ({"text": ""}, ["text_input", "empty"]),
        ({"text": b"caf\xe9"}, ["text_input", "UTF-8", "byte 3"]),
        ({"text": "\ud800"}, ["text_input", "Unicode"]),
        ({"text": b"x" * 5000}, ["TW-TOO-LARGE", "text_input", "5000 bytes", "4096"]),
        ({"text": b"the " * 300}, ["TW-TOO-LARGE", "text_input", "tokens", "255", "256"]),
        ({"text": b"the " * 1000}, ["TW-TOO-LARGE", "text_input", "tokens or more", "255", "256"]),
        ({"text": b"x" * 256}, ["text_input has 256 tokens", "255"]),
        ({"input_ids": np.array([], dtype=np.int32)}, ["input_ids", "no tokens"]),
        ({"input_ids": np.array([5, 9999], dtype=np.int32)}, ["input_ids", "9999", "position 1", "419"]),
        ({"input_ids": np.array([419, 420], dtype=np.int32)}, ["input_ids", "420", "419"]),
        ({"input_ids": np.array([-1], dtype=np.int32)}, ["input_ids", "-1"]),
        ({"input_ids": np.zeros(256, dtype=np.int32)}, ["TW-TOO-LARGE", "input_ids has 256 tokens", "255"]),
        ({"messages": "[]"}, ["messages"]),
        ({"text": "x", "parameters": {"max_tokens": 999, "min_tokens": 256}}, ["min_tokens is 256", "255"]),
        ({"input_ids": np.zeros(256, dtype=np.int32), "parameters": {"max_tokens": 1}}, ["input_ids has 256 tokens"]),
        ({"text": "x", "parameters": {"min_tokens": 256}}, ["min_tokens is 256", "255"]),
        ({"text": "x", "parameters": {"stop_token_ids": [420]}}, ["stop_token_ids", "420", "419"]),
        ({"text": "x", "parameters": {"logit_bias": {"420": 1}}}, ["logit_bias", "420"]),
        ({"text": "x", "parameters": {"logprobs": 10**9}}, ["logprobs is 1000000000: it must be 0 to 20"]),
        ({"text": "x", "parameters": {"n": 17}}, ["n is 17", "1 to 16"]),
        ({"text": "x", "parameters": {"truncate_prompt_tokens": 256}}, ["truncate_prompt_tokens is 256", "1 to 255"]),
        ({"text": "x", "parameters": {"best_of": 2}}, ["TW-UNSUPPORTED", "best_of is 2 and n is 1"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(harness: FrontendHarness, asked: dict[str, object], words: list[str]) -> None:
    error = harness.refuse(**asked)
    for word in words:
        assert word in error
    assert not harness.engine.added
    assert ledger(harness) == (1, 1)
    assert sum(harness.frontend.stats().rejected.values()) == 1


def test_messages_without_a_template(tmp_path: Path) -> None:
    harness = FrontendHarness(tmp_path, template=None)
    assert "no chat template" in harness.refuse(messages=CHAT)
    harness.close()


@pytest.mark.parametrize(
    ("default", "parameters", "expected"),
    [
        (16, {}, 16),
        (16, {"min_tokens": 16}, 16),
        (16, {"max_tokens": 40}, 40),
        (16, {"max_tokens": 2000}, 253),  # a context of 256 and three tokens of prompt
        (16, {"max_completion_tokens": 2**31 - 1, "min_tokens": 253}, 253),
        (1000, {}, 253),
        ("context", {}, 253),
        ("context", {"min_tokens": 253}, 253),
    ],
    ids=str,
)
def test_max_tokens(tmp_path: Path, default: Any, parameters: dict[str, object], expected: int) -> None:
    harness = FrontendHarness(tmp_path, default_max_tokens=default)
    key, _ = harness.submit(input_ids=np.array([5, 6, 7], dtype=np.int32), parameters=parameters)
    assert check_request(harness.message(key), harness.info).max_tokens == expected
    harness.close()


def test_min_tokens_above_the_default_of_max_tokens(tmp_path: Path) -> None:
    harness = FrontendHarness(tmp_path, default_max_tokens=16)
    error = harness.refuse(text="x", parameters={"min_tokens": 17})
    assert error.startswith("[TW-INPUT] min_tokens is 17, more than 16, the default of max_tokens")
    harness.close()


def test_the_longest_prompt_that_fits(harness: FrontendHarness) -> None:
    key, _ = harness.submit(input_ids=np.full(255, 7, dtype=np.int32))
    assert check_request(harness.message(key), harness.info).max_tokens == 1


@pytest.mark.parametrize("error", [Busy("full", retry_after_ms=5), EngineDead("gone")], ids=["busy", "dead"])
def test_an_engine_that_refuses(harness: FrontendHarness, error: Busy | EngineDead) -> None:
    harness.engine.refusal = error
    assert harness.refuse(text="x") == str(error)
    assert ledger(harness) == (1, 1)


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_a_refused_request_is_freed_at_once(harness: FrontendHarness) -> None:
    """Its prompt may have megabytes, and a collection may be hours away."""
    for text in ("the " * 300, ""):
        harness.refuse(text=text)
    deadline = time.monotonic() + 30
    while kept := [one for one in gc.get_objects() if isinstance(one, LiveRequest)]:
        assert time.monotonic() < deadline, kept
        del kept
        time.sleep(0.01)


def test_too_much_waits_for_the_tokenizer(harness: FrontendHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_gate, "_MAX_REQUESTS", 0)
    assert harness.refuse(text="x").startswith("[TW-BUSY retry_after_ms=250] ")
    monkeypatch.undo()
    harness.frontend._prompts._max_bytes = 10
    assert "10 prompt bytes" in harness.refuse(text="x" * 11)
    harness.submit("x")


def test_a_preparation_that_crashes(harness: FrontendHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("secret path")

    monkeypatch.setattr(harness.frontend._reader, "read", crash)
    assert harness.refuse(text="x") == "[TW-INTERNAL] the request could not be prepared"


# --- ends ---------------------------------------------------------------------------------------------------------


def test_an_error_of_the_engine(harness: FrontendHarness) -> None:
    key, sink = harness.submit(stream=True)
    harness.deliver(key, harness.encode("x"))
    sink.wait_chunks(1)
    harness.deliver(key, [], "error", error=error_info())
    sink.wait_end()
    assert str(sink.error) == "[TW-NUMERIC] logits are not finite"
    assert harness.frontend.stats().failed == {"TW-NUMERIC": 1}
    assert not harness.engine.cancelled


def test_requests_that_the_engine_lost(harness: FrontendHarness) -> None:
    submitted = [harness.submit(stream=True) for _ in range(5)]
    wait_for(lambda: all(one.is_at_engine for one in harness.frontend._live.values()), 30, "requests at the engine")
    harness.frontend.on_lost([s.key for s in submitted] + [999], EngineDead("gone", retry_after_ms=7))
    for _, sink in submitted:
        sink.wait_end()
        assert str(sink.error) == "[TW-ENGINE-DEAD retry_after_ms=7] gone"
    assert not harness.engine.cancelled
    assert harness.frontend.stats().failed == {"TW-ENGINE-DEAD": 5}


def test_a_client_that_is_gone(harness: FrontendHarness) -> None:
    key, sink = harness.submit(stream=True)
    harness.deliver(key, harness.encode("x"))
    sink.wait_chunks(1)
    sink.gone.set()
    sink.wait_end()
    harness.engine.wait_cancelled(key)
    assert sink.finish_reason == "cancelled"
    figures = harness.frontend.stats()
    assert figures.finished == {"cancelled": 1}
    assert not sum(figures.e2e_latency.counts)  # it says nothing of how long an answer takes
    assert ledger(harness) == (1, 1)


def test_cancelled_while_it_waits_for_the_tokenizer(harness: FrontendHarness) -> None:
    started, go_on = threading.Event(), threading.Event()
    prepare = harness.frontend._reader.read

    def slow(*arguments: object) -> object:
        started.set()
        assert go_on.wait(30)
        return prepare(*arguments)  # type: ignore[arg-type]

    harness.frontend._reader.read = slow  # type: ignore[method-assign, assignment]
    sink = RecordingSink()
    harness.frontend.submit(GenerateRequest(text="x"), sink)
    assert started.wait(30)
    sink.gone.set()
    sink.wait_end()
    go_on.set()
    harness.close()
    assert sink.finish_reason == "cancelled"
    assert (sink.num_ends, harness.engine.added, harness.engine.cancelled) == (1, {}, [])


def test_cancelled_while_the_engine_takes_it(harness: FrontendHarness) -> None:
    """The engine has it when `add` returns, and is told then."""
    sink = RecordingSink()
    add = harness.engine.add

    def slow(message: object) -> None:
        sink.gone.set()
        sink.wait_end()
        add(message)  # type: ignore[arg-type]

    harness.engine.add = slow  # type: ignore[method-assign]
    key, _ = harness.submit("x", sink)
    harness.engine.wait_cancelled(key)
    assert sink.finish_reason == "cancelled"


def test_output_that_cannot_be_made_into_text(harness: FrontendHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    key, sink = harness.submit(stream=True)
    monkeypatch.setattr(harness.frontend._live[key].prepared.outputs, "push", None)
    harness.deliver(key, [5])
    sink.wait_end()
    harness.engine.wait_cancelled(key)
    assert str(sink.error) == "[TW-INTERNAL] the output could not be made into text"


class Panic(BaseException):
    """As the tokenizers library raises them."""


def test_a_tokenizer_that_panics_at_outputs_ends_each_request_alone(
    harness: FrontendHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object, **__: object) -> str:
        raise Panic("index out of bounds")

    broken = [harness.submit(stream=True) for _ in range(8)]  # more than there are senders
    backend = harness.frontend._reader._tokenizer
    with monkeypatch.context() as patch:
        patch.setattr(backend, "backend", mock.Mock(decode=panic))
        for key, sink in broken:
            harness.deliver(key, [5])
            sink.wait_end()
            assert str(sink.error) == "[TW-INTERNAL] the output could not be made into text"
    key, sink = harness.submit(stream=True)
    harness.deliver(key, harness.encode("the fox"), "length")
    sink.wait_end()
    assert sink.finish_reason == "length"


def test_close(harness: FrontendHarness) -> None:
    submitted = [harness.submit(stream=True) for _ in range(5)]
    harness.close()
    for key, sink in submitted:
        assert str(sink.error) == "[TW-DRAINING] the server is shutting down"
        assert (sink.num_ends, key in harness.engine.cancelled) == (1, True)
    assert harness.refuse(text="late") == "[TW-DRAINING] the server is shutting down"
    assert ledger(harness) == (6, 6)
    harness.close()


def test_a_drain_ends_what_the_engine_does_not_have(
    harness: FrontendHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = harness.submit()
    encoder, may_go_on = harness.frontend._reader._encoder, threading.Event()
    encode = encoder.encode

    def slowly(text: str, **options: bool) -> Int32Array:
        assert may_go_on.wait(TIMEOUT_S)
        return encode(text, **options)

    monkeypatch.setattr(encoder, "encode", slowly)
    waiting = [harness.submit_at_now() for _ in range(4)]
    harness.frontend.on_drain()
    for sink in waiting:
        sink.wait_end()
        assert str(sink.error) == "[TW-DRAINING] the server is shutting down"
    assert harness.refuse(text="late") == "[TW-DRAINING] the server is shutting down"
    may_go_on.set()
    assert harness.finish(submitted, "x").finish_reason == "length"
    harness.frontend.on_lost([], EngineDead("the engine is gone"))
    assert harness.finish(harness.submit(), "x").finish_reason == "length"
    assert len(harness.engine.added) == 2


def test_figures_are_published_before_the_last_response(harness: FrontendHarness) -> None:
    key, sink = harness.submit("Hello", stream=True)
    published: list[tuple[int, int]] = []
    harness.frontend.on_idle = lambda: published.append((harness.frontend.stats().finished.total(), sink.num_ends))
    harness.deliver(key, [5])
    sink.wait_chunks(1)
    harness.deliver(key, [6], "length")
    sink.wait_end()
    assert published == [(1, 0)]


def test_figures_are_published_with_the_last_request_in_flight(harness: FrontendHarness) -> None:
    published: list[int] = []
    harness.frontend.on_idle = lambda: published.append(harness.frontend.stats().finished.total())
    submitted = [harness.submit() for _ in range(3)]
    for one in submitted:
        harness.finish(one, "x")
    assert published == [3]


def test_figures(harness: FrontendHarness) -> None:
    key, sink = harness.submit("Hello", stream=True)
    harness.deliver(key, [5])
    harness.deliver(key, [6, 7])
    harness.frontend.on_deltas([delta(key, [8], "length", stats=stats()), delta(999, [1])])
    sink.wait_end()
    figures = harness.frontend.stats()
    assert figures.finished == {"length": 1}
    assert figures.num_prompt_tokens == len(harness.encode("Hello"))
    assert figures.num_generation_tokens == 4
    assert figures.answered == figures.in_time == {"normal": 1}
    assert sum(figures.time_to_first_token.counts) == 1
    assert sum(figures.inter_token_latency.counts) == 3
    assert sum(figures.e2e_latency.counts) == sum(figures.queue_time.counts) == 1
    assert (sum(figures.prompt_tokens.sums), sum(figures.output_tokens.sums)) == (len(harness.encode("Hello")), 4)
    assert sum(figures.num_sequences.sums) == 1
    assert len(figures.queue_time.counts) == len(figures.queue_time.bounds) + 1


def test_an_answer_has_room_for_so_many_logprobs(harness: FrontendHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reader, "MAX_ANSWER_LOGPROBS", 320)
    harness.submit(parameters={"n": 8, "logprobs": 1, "max_tokens": 20})
    harness.submit(parameters={"n": 8, "max_tokens": 200})
    error = harness.refuse(text="x", parameters={"n": 8, "logprobs": 1, "max_tokens": 21})
    assert "logprobs is 1, and n x max_tokens 168: an answer has room for 320" in error
