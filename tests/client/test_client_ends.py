"""How a request may end: errors by tag and by status, cancels, time limits, broken streams; neighbours unharmed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

import tidewheel_client as tc
from support.triton.grpc_triton import Answer, Asked, FakeTriton, Refused, response
from tidewheel_client import Client
from tidewheel_client.errors import BY_TAG


def refuse(code: grpc.StatusCode, text: str) -> Callable[[Asked], Answer]:
    def answer(asked: Asked) -> Answer:
        raise Refused(code, text)
        yield

    return answer


def say_error(text: str) -> Callable[[Asked], Answer]:
    return lambda asked: iter([pb.ModelStreamInferResponse(error_message=text)])


def hold(release: threading.Event) -> Callable[[Asked], Answer]:
    """Says one word, then nothing until the event."""

    def answer(asked: Asked) -> Answer:
        yield response(asked.message, text_output="first ", finish_reason="None")
        release.wait(30)
        yield response(asked.message, text_output="last", finish_reason="stop")

    return answer


def test_a_restricted_protocol(client: Client, triton: FakeTriton) -> None:
    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
    triton.answer = refuse(grpc.StatusCode.UNAVAILABLE, text)
    with pytest.raises(tc.Unsupported, match=r"expecting header .* serve --open-api") as caught:
        client.generate("x")
    assert not caught.value.retryable


def test_no_stream_is_cancelled_as_its_error_is_sent(client: Client, triton: FakeTriton) -> None:
    was_cancelled = triton.refuse_and_listen("[TW-INPUT] no")
    with pytest.raises(tc.InvalidRequest), client.stream("x") as stream:
        list(stream)
    assert was_cancelled == [False]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Stream removed (Socket closed)"),
        (grpc.StatusCode.UNAVAILABLE, "recvmsg:Connection reset by peer"),
        (grpc.StatusCode.INTERNAL, "Internal error from Core"),  # of asyncio, for a request that was not written
    ],
)
def test_a_connection_that_is_lost(client: Client, triton: FakeTriton, code: grpc.StatusCode, text: str) -> None:
    triton.answer = refuse(code, text)
    with pytest.raises(tc.ServerUnavailable, match=rf"^the connection to {client.url} was lost \(") as caught:
        client.generate("x")
    assert text in str(caught.value)
    assert caught.value.retryable


@pytest.mark.parametrize("tag", sorted(BY_TAG))
@pytest.mark.parametrize("with_status", [True, False])
def test_tagged_errors(client: Client, triton: FakeTriton, tag: str, with_status: bool) -> None:
    text = f"[{tag} retry_after_ms=250] waiting set is full"
    triton.answer = refuse(grpc.StatusCode.UNAVAILABLE, text) if with_status else say_error(text)
    with pytest.raises(tc.RequestError) as caught:
        client.generate("x")
    assert type(caught.value) is BY_TAG[tag]
    assert caught.value.message == "waiting set is full"
    assert caught.value.retry_after_ms == 250
    assert str(caught.value) == text


def test_a_host_that_does_not_exist_is_said_shortly(client: Client, triton: FakeTriton) -> None:
    for text in (
        "errors resolving x:1: [field:hostname lookup error]",
        "DNS resolution failed for x:1: C-ares status",
    ):
        triton.answer = refuse(grpc.StatusCode.UNAVAILABLE, text)
        with pytest.raises(tc.ServerUnavailable, match=rf"^no such host: {client.url}$"):
            client.generate("x")


def test_a_tag_of_a_newer_server_keeps_its_text(client: Client, triton: FakeTriton) -> None:
    triton.answer = say_error("[TW-TOMORROW] from the future")
    with pytest.raises(tc.InternalError, match="TW-TOMORROW: from the future"):
        client.generate("x")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (say_error("Request for unknown model: 'x' is not found"), tc.NotFound),
        (say_error("Request for unknown model: 'x' has no available versions"), tc.ServerUnavailable),
        (say_error("unexpected inference input 'prompt' for model 'x'"), tc.InvalidRequest),
        (say_error("expected 1 inputs but got 0: missing required input(s) ['label']"), tc.InvalidRequest),
        (say_error("[request id: a] Exceeds maximum queue size"), tc.Busy),
        (say_error("Stub process 'demo_0' is not healthy."), tc.ServerUnavailable),
        (say_error("something else"), tc.RequestError),
        (refuse(grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape"), tc.InvalidRequest),
        (refuse(grpc.StatusCode.UNIMPLEMENTED, "no"), tc.Unsupported),
        (refuse(grpc.StatusCode.INTERNAL, "Stub process 'demo_0' is not healthy."), tc.ServerUnavailable),
        (refuse(grpc.StatusCode.INTERNAL, "oops"), tc.RequestError),
    ],
)
def test_untagged_errors(
    client: Client, triton: FakeTriton, answer: Callable[[Asked], Answer], expected: type[tc.RequestError]
) -> None:
    triton.answer = answer
    with pytest.raises(tc.RequestError) as caught:
        client.generate("x")
    assert type(caught.value) is expected


def test_an_error_ends_the_stream_once(client: Client, triton: FakeTriton) -> None:
    triton.answer = say_error("[TW-INPUT] bad")
    stream = client.stream("x")
    with pytest.raises(tc.InvalidRequest):
        next(stream)
    assert list(stream) == []


def test_a_stream_without_its_last_response_is_an_error(client: Client, triton: FakeTriton) -> None:
    triton.answer = lambda asked: iter([response(asked.message, text_output="half", finish_reason="None")])
    stream = client.stream("x")
    assert next(stream).text == "half"
    with pytest.raises(tc.ServerUnavailable, match="last response"):
        next(stream)


def test_cancel_ends_the_iteration_and_the_call(client: Client, triton: FakeTriton) -> None:
    release = threading.Event()
    triton.answer = hold(release)
    stream = client.stream("x")
    assert next(stream).text == "first "
    stream.cancel()
    stream.cancel()
    assert list(stream) == []
    assert stream.finish_reason is None
    assert triton.ended.wait(60)
    release.set()


def test_cancel_from_another_thread_wakes_the_reader(client: Client, triton: FakeTriton) -> None:
    release = threading.Event()
    triton.answer = hold(release)
    stream = client.stream("x")
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: list(stream))
        stream.cancel()
        assert rest.result(timeout=60) == []
    release.set()


def test_leaving_the_block_cancels(client: Client, triton: FakeTriton) -> None:
    release = threading.Event()
    triton.answer = hold(release)
    with client.stream("x") as stream:
        next(stream)
    assert triton.ended.wait(60)
    release.set()
    with pytest.raises(tc.Cancelled):
        stream.read()


def test_time_limit(client: Client, triton: FakeTriton) -> None:
    release = threading.Event()
    triton.answer = hold(release)
    with pytest.raises(tc.RequestTimeout):
        client.generate("x", timeout_s=0.3)
    release.set()


def test_closing_the_client_ends_its_streams(client: Client, triton: FakeTriton) -> None:
    release = threading.Event()
    triton.answer = hold(release)
    stream = client.stream("x")
    next(stream)
    client.close()
    with pytest.raises(tc.RequestError):
        next(stream)
    release.set()


def test_many_streams_interleave_and_fail_alone(client: Client, triton: FakeTriton) -> None:
    """30 requests at a time over one client; every third fails, the others are whole."""
    gate = threading.Barrier(30)

    def answer(asked: Asked) -> Answer:
        text = asked.inputs["text_input"]
        gate.wait(60)  # all are in flight together
        for index in range(20):
            if index == 10 and int(text) % 3 == 0:
                raise Refused(grpc.StatusCode.UNAVAILABLE, "[TW-ENGINE-DEAD retry_after_ms=1] gone")
            yield response(
                asked.message, text_output=f"{text}.{index} ", finish_reason="stop" if index == 19 else "None"
            )

    def ask(number: int) -> str:
        try:
            return "".join(chunk.text for chunk in client.stream(str(number)))
        except tc.EngineDead as error:
            assert error.retryable
            return "dead"

    triton.answer = answer
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(ask, range(30)))
    for number, text in enumerate(answers):
        assert text == ("dead" if number % 3 == 0 else "".join(f"{number}.{i} " for i in range(20)))


def test_ready_and_metadata(client: Client, triton: FakeTriton) -> None:
    triton.ready = False
    assert not client.is_ready()
    with pytest.raises(tc.RequestTimeout, match="'demo'"):
        client.wait_ready(timeout_s=0.2)
    triton.ready = True
    client.wait_ready(timeout_s=60)
    assert client.metadata() == tc.Metadata(
        server_version="2.51.0",
        model="demo",
        versions=("1",),
        platform="tidewheel",
        inputs=("text_input",),
        outputs=("text_output",),
    )
    assert client.streaming_models() == ("demo", "zebra")


def test_no_server() -> None:
    with Client("127.0.0.1:9", timeout_s=5) as client:
        assert not client.is_ready()
        with pytest.raises(tc.ServerUnavailable):
            client.generate("x")
