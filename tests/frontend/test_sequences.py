"""Requests with several sequences: one response holds what is new of each, and the request ends when all have."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engine.fake_engine import RecordingSink
from support.frontend.front_ends import FrontendHarness, delta, error_info, stats
from tidewheel.engine.messages import WHOLE_REQUEST, ErrorInfo, Room
from tidewheel.errors import EngineDead
from tidewheel.frontend import output
from tidewheel.request_options import RequestOptions

EXPIRED = ErrorInfo("TW-DEADLINE", "deadline_ms is 5: it passed before the request could start")


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[FrontendHarness]:
    harness = FrontendHarness(tmp_path)
    yield harness
    harness.close()


def reasons(sink: RecordingSink) -> list[list[str | None]]:
    return [[chunk.finish_reason for chunk in response] for response in sink.responses]


def test_what_the_engine_gets(harness: FrontendHarness) -> None:
    parameters = {
        "n": 3, "tenant": "acme", "deadline_ms": 2_000_000, "soft_deadline_ms": 1_000_000, "seed": 4,
    }  # fmt: skip
    message = harness.message(harness.submit(parameters=parameters).key)
    assert (message.options.n, message.options.tenant, message.sampling.seed) == (3, "acme", 4)
    assert message.deadline_ns == message.arrival_ns + 2_000_000_000_000
    assert message.soft_deadline_ns == message.arrival_ns + 1_000_000_000_000
    message = harness.message(harness.submit(parameters={"session_id": "s", "session_ttl_s": 9}).key)
    options = message.options
    assert (options.n, options.session_id, options.session_ttl_s, message.deadline_ns) == (1, "s", 9.0, 0)


def test_streaming(harness: FrontendHarness) -> None:
    key, sink = harness.submit(stream=True, parameters={"n": 3})
    harness.frontend.on_deltas([delta(key, harness.encode(char), index=i) for i, char in enumerate("abc")])
    sink.wait_chunks(1)
    harness.deliver(key, harness.encode("B"), index=1)
    sink.wait_chunks(2)
    assert [[chunk.text for chunk in response] for response in sink.responses] == [["a", "b", "c"], ["", "B", ""]]
    harness.deliver(key, harness.encode("C"), "length", index=2)
    sink.wait_chunks(3)
    harness.deliver(key, [2], "stop", index=0)
    sink.wait_chunks(4)
    assert sink.num_ends == 0
    harness.deliver(key, [], "length", index=1)
    sink.wait_end()
    assert sink.texts() == ["a", "bB", "cC"]
    assert reasons(sink) == [
        [None, None, None], [None, None, None], [None, None, "length"], ["stop", None, "length"],
        ["stop", "length", "length"],
    ]  # fmt: skip
    assert not harness.engine.cancelled
    assert harness.frontend.stats().finished == {"stop": 1}


def test_without_streaming_there_is_one_response(harness: FrontendHarness) -> None:
    key, sink = harness.submit("the", echo=True, parameters={"n": 2})
    harness.deliver(key, harness.encode(" fox"), "length", index=1, stats=stats(5))
    harness.deliver(key, harness.encode(" dog"), index=0)
    harness.deliver(key, harness.encode("s"), "length", index=0, stats=stats(6))
    sink.wait_end()
    (response,) = sink.responses
    assert [chunk.text for chunk in response] == ["the dogs", "the fox"]
    assert [chunk.stats.first_scheduled_ns for chunk in response if chunk.stats] == [6, 5]


def test_several_tokens_in_one_response_when_it_is_behind(harness: FrontendHarness) -> None:
    gate = threading.Event()
    key, sink = harness.submit(sink=RecordingSink(gate), stream=True, parameters={"n": 2})
    for char in "abcdef":
        harness.frontend.on_deltas([delta(key, harness.encode(char), index=i) for i in range(2)])
    for index in range(2):
        harness.deliver(key, [], "length", index=index)
    gate.set()
    sink.wait_end()
    assert sink.texts() == ["abcdef"] * 2
    assert len(sink.responses) <= 2


def test_a_stop_string_ends_one_sequence(harness: FrontendHarness) -> None:
    key, sink = harness.submit(stream=True, parameters={"n": 2, "stop": "END"})
    for char in "one END two":
        harness.deliver(key, harness.encode(char), index=0)
    harness.engine.wait(lambda: harness.engine.cancelled_sequences == [(key, 0)])
    harness.deliver(key, harness.encode("x"), index=1)
    harness.deliver(key, [], "cancelled", index=0)  # the engine's last word on it
    harness.deliver(key, harness.encode("y"), "length", index=1)
    sink.wait_end()
    assert sink.texts() == ["one ", "xy"]
    assert reasons(sink)[-1] == ["stop", "length"]
    assert not harness.engine.cancelled


def test_stop_strings_end_all_sequences(harness: FrontendHarness) -> None:
    key, sink = harness.submit(parameters={"n": 2, "stop": "b"})
    for index in (1, 0):
        harness.deliver(key, harness.encode("abc"), index=index)
    sink.wait_end()
    assert sink.texts() == ["a", "a"]
    harness.engine.wait_cancelled(key)  # what it still works on


def test_a_client_that_is_gone_ends_all(harness: FrontendHarness) -> None:
    key, sink = harness.submit(stream=True, parameters={"n": 2})
    harness.deliver(key, harness.encode("x"), "length", index=0)
    sink.wait_chunks(1)
    sink.gone.set()
    sink.wait_end()
    harness.engine.wait_cancelled(key)
    assert reasons(sink)[-1] == ["length", "cancelled"]


def test_an_error_of_one_sequence_ends_the_request(harness: FrontendHarness) -> None:
    key, sink = harness.submit(stream=True, parameters={"n": 2})
    harness.deliver(key, harness.encode("x"), index=0)
    sink.wait_chunks(1)
    harness.deliver(key, [], "error", error=error_info(), index=1)
    sink.wait_end()
    assert str(sink.error) == "[TW-NUMERIC] logits are not finite"
    harness.engine.wait_cancelled(key)
    harness.deliver(key, [], "cancelled", index=0)
    assert sink.num_ends == 1


def test_a_refusal_is_of_the_whole_request(harness: FrontendHarness) -> None:
    key, sink = harness.submit(parameters={"n": 4})
    harness.deliver(key, [], "error", error=ErrorInfo("TW-BUSY", "full", 7), index=WHOLE_REQUEST)
    sink.wait_end()
    assert str(sink.error) == "[TW-BUSY retry_after_ms=7] full"
    assert not harness.engine.cancelled


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["leader first", "leader last"])
def test_a_deadline_ends_those_that_run_and_those_that_wait(harness: FrontendHarness, order: tuple[int, int]) -> None:
    key, sink = harness.submit(parameters={"n": 2})
    harness.deliver(key, harness.encode("x"), index=0)
    last = [delta(key, [], "deadline", index=0), delta(key, [], "error", error=EXPIRED, index=1)]
    harness.frontend.on_deltas([last[index] for index in order])
    sink.wait_end()
    assert sink.texts() == ["x", ""]
    assert reasons(sink) == [["deadline", "deadline"]]


@pytest.mark.parametrize("n", [1, 3])
def test_a_deadline_before_anything_started_is_an_error(harness: FrontendHarness, n: int) -> None:
    key, sink = harness.submit(parameters={"n": n})
    for index in range(n):
        harness.deliver(key, [], "error", error=EXPIRED, index=index)
    sink.wait_end()
    assert str(sink.error) == f"[TW-DEADLINE] {EXPIRED.message}"
    assert harness.frontend.stats().rejected == {"TW-DEADLINE": 1}


def test_an_engine_that_forgets_a_deadline(harness: FrontendHarness) -> None:
    """It is left a little time to end what it has heard of, and no more."""
    key, sink = harness.submit(stream=True, parameters={"deadline_ms": 1e9})
    harness.frontend.on_room(Room(1, 4, 0, 100, 4, 250, None, received=[key]))
    harness.deliver(key, harness.encode("x"))
    request = harness.frontend._live[key]
    harness.frontend._expire(request)
    assert not request.is_over
    harness.frontend._expire(request)
    sink.wait_end()
    harness.engine.wait_cancelled(key)
    assert (sink.text, sink.finish_reason) == ("x", "deadline")


def test_lost_sequences(harness: FrontendHarness) -> None:
    key, sink = harness.submit(stream=True, parameters={"n": 2})
    harness.deliver(key, harness.encode("x"), "length", index=0)
    sink.wait_chunks(1)
    harness.frontend.on_lost([key], EngineDead("gone"))
    sink.wait_end()
    assert str(sink.error) == "[TW-ENGINE-DEAD] gone"


def test_figures(harness: FrontendHarness) -> None:
    key, sink = harness.submit("Hello", stream=True, parameters={"n": 2})
    for index in (0, 1, 0):
        harness.deliver(key, [5], index=index)
    harness.frontend.on_deltas([delta(key, [6], "length", index=i, stats=stats()) for i in range(2)])
    sink.wait_end()
    figures = harness.frontend.stats()
    assert (figures.finished, figures.num_generation_tokens) == ({"length": 1}, 5)
    assert figures.num_prompt_tokens == len(harness.encode("Hello"))
    assert sum(figures.time_to_first_token.counts) == 1
    assert sum(figures.inter_token_latency.counts) == 3


def test_the_first_sequence_may_begin_after_another(harness: FrontendHarness) -> None:
    """Its first token is neither the request's first one nor a later one of its sequence."""
    key, sink = harness.submit(stream=True, parameters={"n": 2})
    harness.deliver(key, harness.encode("a"), index=1)
    first_output_ns = harness.frontend._live[key].first_output_ns
    (token_id,) = harness.encode("b")
    harness.deliver_tokens({key: token_id})
    assert harness.frontend._live[key].first_output_ns == first_output_ns
    sink.wait_chunks(1)
    harness.frontend.on_deltas([delta(key, [6], "length", index=i, stats=stats()) for i in range(2)])
    sink.wait_end()
    figures = harness.frontend.stats()
    assert figures.num_generation_tokens == 4
    assert sum(figures.time_to_first_token.counts) == 1
    assert sum(figures.inter_token_latency.counts) == 2


# --- sessions -----------------------------------------------------------------------------------------------------


def close_session(harness: FrontendHarness, **asked: object) -> RecordingSink:
    parameters = {"close_session": True, "session_id": "s", "tenant": "acme"}
    sink = harness.submit_at_now(parameters=parameters, **{"text": None, **asked})
    harness.engine.wait(lambda: bool(harness.engine.closed))
    return sink


@pytest.mark.parametrize("text", [None, "", b""])
def test_a_session_is_closed_without_a_prompt(harness: FrontendHarness, text: str | bytes | None) -> None:
    sink = close_session(harness, text=text)
    (message,) = harness.engine.closed
    assert message.options == RequestOptions(tenant="acme", session_id="s", close_session=True)
    harness.deliver(message.key, [], "stop", index=WHOLE_REQUEST)
    sink.wait_end()
    assert [(chunk.text, chunk.finish_reason) for chunk in sink.chunks] == [("", "stop")]


def test_a_session_that_is_not_there(harness: FrontendHarness) -> None:
    sink = close_session(harness, stream=True)
    error = ErrorInfo("TW-NOT-FOUND", "session 's' of tenant 'acme' is not kept")
    harness.deliver(harness.engine.closed[0].key, [], "error", error=error, index=WHOLE_REQUEST)
    sink.wait_end()
    assert str(sink.error) == "[TW-NOT-FOUND] session 's' of tenant 'acme' is not kept"


@pytest.mark.parametrize("order", [{"close_session": True}, {"pause_session": ["search"]}], ids=str)
def test_an_order_about_a_session_takes_no_prompt(harness: FrontendHarness, order: dict[str, object]) -> None:
    assert "takes none" in harness.refuse(text="Hello", parameters={**order, "session_id": "s"})


def test_a_session_is_paused_without_a_prompt(harness: FrontendHarness) -> None:
    sink = harness.submit_at_now(parameters={"pause_session": ["search"], "session_id": "s"}, text="")
    harness.engine.wait(lambda: bool(harness.engine.closed))
    (message,) = harness.engine.closed
    assert message.options == RequestOptions(session_id="s", pause_session=("search",))
    harness.deliver(message.key, [], "stop", index=WHOLE_REQUEST)
    sink.wait_end()
    assert [(chunk.text, chunk.finish_reason) for chunk in sink.chunks] == [("", "stop")]


@pytest.mark.parametrize(
    "order",
    [{"lora_order": "load", "lora_name": "sql", "lora_path": "a/sql"}, {"lora_order": "unload", "lora_name": "sql"},
     {"lora_order": "list"}],
    ids=str,
)  # fmt: skip
def test_an_order_about_adapters_is_answered_with_a_text(harness: FrontendHarness, order: dict[str, str]) -> None:
    sink = harness.submit_at_now(parameters=order, text="")
    harness.engine.wait(lambda: bool(harness.engine.closed))
    (message,) = harness.engine.closed
    assert message.options == RequestOptions(**order)
    harness.deliver(message.key, [], "stop", index=WHOLE_REQUEST, answer="[]")
    sink.wait_end()
    assert [(chunk.text, chunk.finish_reason) for chunk in sink.chunks] == [("[]", "stop")]
    assert "takes none" in harness.refuse(text="Hello", parameters=order)


def test_a_request_names_its_adapter(harness: FrontendHarness) -> None:
    for parameters in ({"lora_name": "sql"}, {"lora_name": b"sql"}):
        key, _ = harness.submit(parameters=parameters)
        assert harness.message(key).options.lora_name == "sql"
    assert "lora_name does not go with the task tokenize" in harness.refuse(
        text="Hello", task="tokenize", parameters={"lora_name": "sql"}
    )


# --- what is built for a request, and when ------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is built for the output of requests, by class."""
    counts: Counter[str] = Counter()
    for name in ("OutputStream", "Detokenizer"):
        real = getattr(output, name)

        def count(*arguments: object, real: type = real, **options: object) -> object:
            counts[real.__name__] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(output, name, count)
    return counts


LARGEST = {"n": 16, "stop": ["a" * 255 + chr(ord("b") + index) for index in range(16)]}


def test_outputs_are_built_with_the_first_output(harness: FrontendHarness, built: Counter[str]) -> None:
    key, sink = harness.submit(stream=True, parameters=LARGEST)
    assert not built  # the engine may still refuse it
    for index in range(16):
        harness.deliver(key, harness.encode("xy"), "length", index=index)
    sink.wait_end()
    assert sink.texts() == ["xy"] * 16
    assert built == {"OutputStream": 16, "Detokenizer": 16}


@pytest.mark.parametrize("n", [1, 16])
def test_a_request_that_the_engine_refuses_costs_no_output(
    harness: FrontendHarness, built: Counter[str], n: int
) -> None:
    key, sink = harness.submit(stream=True, parameters={**LARGEST, "n": n})
    harness.deliver(key, [], "error", error=error_info("TW-BUSY", "full"), index=WHOLE_REQUEST)
    sink.wait_end()
    key, sink = harness.submit(stream=True, parameters={**LARGEST, "n": n})
    for index in range(n):
        harness.deliver(key, [], "error", error=EXPIRED, index=index)
    sink.wait_end()
    assert not built


def test_a_request_that_is_refused_at_the_door_costs_no_output(harness: FrontendHarness, built: Counter[str]) -> None:
    harness.frontend.on_room(Room(4, 4, 0, 100, 1, 250, None, []))
    assert "TW-BUSY" in harness.refuse(text="x", parameters=LARGEST)
    assert not built
