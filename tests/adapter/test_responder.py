"""One request, any number of chunks, exactly one FINAL."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from support.triton import fake_triton
from support.triton.fake_triton import InferenceResponseSender, TritonError
from tidewheel import errors
from tidewheel.adapter.responder import TritonSink
from tidewheel.adapter.tensors import ResponseFormat
from tidewheel.frontend.output import OutputChunk

LAST = OutputChunk(text="c", finish_reason="stop")


def make_sink(**response_format: bool) -> tuple[TritonSink, InferenceResponseSender]:
    sender = InferenceResponseSender()
    sink = TritonSink(sender)
    sink.format = ResponseFormat(**response_format)
    return sink, sender


def texts(sender: InferenceResponseSender) -> list[str]:
    return [response.output_tensors()[0].as_numpy()[0].decode() for response, _ in sender.sent]


def only_error(sender: InferenceResponseSender) -> TritonError:
    (response, flags), *others = sender.sent
    assert not others
    assert flags == fake_triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    assert response.output_tensors() == []
    error = response.error()
    assert error is not None
    return error


def test_the_final_flag_rides_on_the_last_chunk() -> None:
    sink, sender = make_sink()
    for chunk in (OutputChunk(text="a"), OutputChunk(text="b"), LAST):
        sink.send([chunk])
    assert texts(sender) == ["a", "b", "c"]
    assert [flags for _, flags in sender.sent] == [0, 0, 1]


def test_nothing_follows_the_final_response() -> None:
    sink, sender = make_sink()
    sink.send([LAST])
    sink.send([LAST])
    sink.fail(errors.Cancelled("late"))
    assert len(sender.sent) == 1


def test_nothing_follows_an_error() -> None:
    sink, sender = make_sink()
    sink.fail(errors.Busy("full", retry_after_ms=250))
    sink.fail(errors.Cancelled("late"))
    sink.send([LAST])
    assert only_error(sender).message() == "[TW-BUSY retry_after_ms=250] full"


def test_text_accumulates_when_asked() -> None:
    sink, sender = make_sink(accumulate=True)
    for chunk in (OutputChunk(text="a"), OutputChunk(text="b"), LAST):
        sink.send([chunk])
    assert texts(sender) == ["a", "ab", "abc"]


def test_the_last_of_several_sequences_ends_the_request() -> None:
    sink, sender = make_sink(accumulate=True)
    open_chunk = OutputChunk(text="a")
    for response in (
        [open_chunk, open_chunk],
        [LAST, open_chunk],
        [OutputChunk(text="", finish_reason="stop"), LAST],
    ):
        sink.send(response)
    sink.send([LAST, LAST])
    tensors = [response.output_tensors()[0].as_numpy().tolist() for response, _ in sender.sent]
    assert tensors == [[b"a", b"a"], [b"ac", b"aa"], [b"ac", b"aac"]]
    assert [flags for _, flags in sender.sent] == [0, 0, 1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest, TritonError.INVALID_ARG),
        (errors.PromptTooLarge, TritonError.INVALID_ARG),
        (errors.Unsupported, TritonError.UNSUPPORTED),
        (errors.NotFound, TritonError.NOT_FOUND),
        (errors.Busy, TritonError.UNAVAILABLE),
        (errors.Draining, TritonError.UNAVAILABLE),
        (errors.DeadlineExceeded, TritonError.UNAVAILABLE),
        (errors.EngineDead, TritonError.UNAVAILABLE),
        (errors.Cancelled, TritonError.CANCELLED),
        (errors.NumericError, TritonError.INTERNAL),
        (errors.InternalError, TritonError.INTERNAL),
    ],
)
def test_error_codes(error: type[errors.TidewheelError], code: int) -> None:
    sink, sender = make_sink()
    sink.fail(error("why"))
    assert only_error(sender).code() == code
    assert only_error(sender).message() == f"[{error.tag}] why"


def test_messages_that_quote_what_clients_send() -> None:
    sink, sender = make_sink()
    sink.fail(errors.InvalidRequest("key 'a\ud800\x00\n\x1b[1mé'" + "x" * 10_000))
    message = only_error(sender).message()
    assert message.startswith(r"[TW-INPUT] key 'a\ud800\x00\n\x1b[1mé'")
    assert len(message) < 2100


def test_is_cancelled_follows_triton_until_the_end() -> None:
    sink, sender = make_sink()
    assert not sink.is_cancelled()
    sender.cancelled = True
    assert sink.is_cancelled()


def test_triton_is_never_asked_after_the_end() -> None:
    """The fake sender asserts it: the real server would crash."""
    for end in (lambda sink: sink.send([LAST]), lambda sink: sink.fail(errors.Cancelled("x"))):
        sink, _ = make_sink()
        end(sink)
        assert not sink.is_cancelled()


def test_is_cancelled_does_not_wait_for_a_send() -> None:
    sink, sender = make_sink()
    entered, leave = threading.Event(), threading.Event()
    send = sender.send

    def slow_send(response: Any, flags: int = 0) -> None:
        entered.set()
        assert leave.wait(60)
        send(response, flags)

    sender.send = slow_send  # type: ignore[method-assign]
    thread = threading.Thread(target=sink.send, args=([LAST],))
    thread.start()
    assert entered.wait(60)
    sender.cancelled = True
    assert not sink.is_cancelled()  # at once, and without touching the sender
    leave.set()
    thread.join(60)
    assert texts(sender) == ["c"]


@pytest.mark.parametrize("chunk", [OutputChunk(text="a"), LAST])
def test_a_response_that_cannot_be_sent_ends_the_request(chunk: OutputChunk) -> None:
    sink, sender = make_sink()
    sender.fail_next = fake_triton.TritonModelException("Failed to increase the shared memory pool size")
    sink.send([chunk])
    assert only_error(sender).code() == TritonError.INTERNAL
    assert sink.is_cancelled()
    assert any("shared memory pool" in line for _, line in fake_triton.Logger.lines)


def test_an_error_that_cannot_be_sent_is_logged() -> None:
    sink, sender = make_sink()
    sender.fail_next = fake_triton.TritonModelException("no shared memory")
    sink.fail(errors.Busy("full"))
    assert sender.sent == []
    assert any("no shared memory" in line for _, line in fake_triton.Logger.lines)
    assert not sink.is_cancelled()
