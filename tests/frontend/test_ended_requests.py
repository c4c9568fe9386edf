"""What a front end tells of each request that has ended: once, with its figures, and nothing of its text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.frontend.front_ends import FrontendHarness, RecordingSink, error_info, stats
from support.triton.serving import wait_for
from tidewheel.engine.messages import RequestStats
from tidewheel.errors import EngineDead, InvalidRequest
from tidewheel.frontend.ended_requests import EndedRequest

SECRET = "Hello there"


@pytest.fixture
def ended() -> list[EndedRequest]:
    return []


@pytest.fixture
def harness(tmp_path: Path, ended: list[EndedRequest]) -> Iterator[FrontendHarness]:
    harness = FrontendHarness(tmp_path, on_ended=[ended.append])
    yield harness
    harness.close()


def the_one(ended: list[EndedRequest]) -> EndedRequest:
    wait_for(lambda: ended, 60, "an ended request")
    (only,) = ended
    return only


def test_an_answer_tells_its_figures(harness: FrontendHarness, ended: list[EndedRequest]) -> None:
    asked = {"tenant": "acme", "priority": 2, "deadline_ms": 60_000, "session_id": "s"}
    submitted = harness.submit(request_id="r7", stream=True, parameters=asked)
    message = harness.message(submitted.key)
    begin = message.arrival_ns
    figures = RequestStats(begin + 5, begin + 7, begin + 9, num_cached_tokens=3, num_preemptions=2, priority=2)
    tokens = harness.encode("one two")
    harness.deliver(submitted.key, tokens, "length", stats=figures)
    submitted.sink.wait_end()
    one = the_one(ended)
    assert (one.request_id, one.tenant, one.priority, one.session) == ("r7", "acme", "HIGH", True)
    assert (one.finish_reason, one.tag, one.client_cancelled, one.stream) == ("length", None, False, True)
    assert (one.prompt_tokens, one.output_tokens) == (len(message.prompt) // 4, len(tokens))
    assert (one.cached_tokens, one.preemptions) == (3, 2)
    assert one.responses == len(submitted.sink.responses) > 0
    assert one.deadline_ms == 60_000
    moments = (one.scheduled_ns, one.first_token_ns, one.last_token_ns)
    assert [moment - begin for moment in moments] == [5, 7, 9]
    assert one.end_ns >= begin


def test_a_stop_string_leaves_the_first_token_of_the_front_end(
    harness: FrontendHarness, ended: list[EndedRequest]
) -> None:
    before = time.monotonic_ns()
    submitted = harness.submit(stream=True, parameters={"stop": ["two"]})
    harness.deliver_tokens({submitted.key: harness.encode("one")[0]})
    harness.deliver(submitted.key, harness.encode(" two three"))
    submitted.sink.wait_end()
    one = the_one(ended)
    assert one.finish_reason == "stop" and one.cached_tokens is None
    assert before <= one.first_token_ns <= one.end_ns
    assert one.scheduled_ns == 0 and one.first_token_ns > 0


def test_sequences_are_told_together(harness: FrontendHarness, ended: list[EndedRequest]) -> None:
    submitted = harness.submit(parameters={"n": 2})
    token = harness.encode("one")[:1]
    for index, start in enumerate((50, 20)):
        harness.deliver(submitted.key, token, "length", index=index, stats=stats(start))
    submitted.sink.wait_end()
    one = the_one(ended)
    assert (one.sequences, one.output_tokens, one.scheduled_ns) == (2, 2, 20)


@pytest.mark.parametrize(
    ("asked", "tag", "tenant"),
    [
        ({"text": "x", "parameters": {"temperature": -1, "tenant": "acme"}}, "TW-INPUT", "acme"),
        ({"text": "x", "parameters": {"tenant": 7 * ["x"]}}, "TW-INPUT", ""),
        ({"text": "x" * 5000}, "TW-TOO-LARGE", ""),
    ],
)
def test_refusals_are_told_by_their_tag(
    harness: FrontendHarness, ended: list[EndedRequest], asked: dict[str, object], tag: str, tenant: str
) -> None:
    harness.refuse(**asked)
    one = the_one(ended)
    assert (one.tag, one.finish_reason, one.tenant, one.output_tokens) == (tag, None, tenant, 0)


def test_a_request_that_cannot_be_read_is_refused_and_reported(
    harness: FrontendHarness, ended: list[EndedRequest]
) -> None:
    sink = RecordingSink()
    harness.frontend.refuse("q", sink, time.monotonic_ns(), InvalidRequest("sampling_parameters is not JSON"))
    one = the_one(ended)
    assert (one.request_id, one.tag, one.responses) == ("q", "TW-INPUT", 0)
    assert str(sink.error) == "[TW-INPUT] sampling_parameters is not JSON"
    assert harness.frontend.stats().rejected == {"TW-INPUT": 1}


def test_an_engine_that_dies_is_told_with_the_tokens_until_then(
    harness: FrontendHarness, ended: list[EndedRequest]
) -> None:
    submitted = harness.submit(stream=True)
    harness.deliver_tokens({submitted.key: harness.encode("one")[0]})
    wait_for(lambda: submitted.sink.responses, 60, "the first token")
    harness.frontend.on_lost([submitted.key], EngineDead("gone"))
    submitted.sink.wait_end()
    one = the_one(ended)
    assert (one.tag, one.output_tokens, one.responses) == ("TW-ENGINE-DEAD", 1, 1)


def test_a_client_that_leaves_is_told(harness: FrontendHarness, ended: list[EndedRequest]) -> None:
    submitted = harness.submit(stream=True)
    submitted.sink.gone.set()
    submitted.sink.wait_end()
    one = the_one(ended)
    assert one.client_cancelled and one.finish_reason == "cancelled"


def test_nothing_of_the_text_is_told(harness: FrontendHarness, ended: list[EndedRequest]) -> None:
    submitted = harness.submit(SECRET, parameters={"stop": ["zebra"]})
    harness.finish(submitted, SECRET)
    harness.refuse(text=SECRET, parameters={"stop": SECRET, "nonsense": SECRET})
    wait_for(lambda: len(ended) == 2, 60, "both")
    assert "Hello" not in repr(ended) and "there" not in repr(ended)


def test_numeric_errors_keep_their_tag(harness: FrontendHarness, ended: list[EndedRequest]) -> None:
    submitted = harness.submit()
    harness.deliver(submitted.key, [], "error", error=error_info(), stats=stats())
    submitted.sink.wait_end()
    assert the_one(ended).tag == "TW-NUMERIC"
