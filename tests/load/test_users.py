"""Each kind of user against a server that is held in the middle of an answer, or refuses one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from support.gateway.running_gateway import gateway_to
from support.triton.grpc_triton import Answer, Asked, FakeTriton, Refused, response
from support.triton.grpc_triton import say_words as say_words_over_grpc
from support.triton.http_triton import Body, FakeHttpTriton, HttpError, error_body, one_answer, say_words
from tidewheel_client.load.load_options import Timing

LIMIT_S = 60
TAGGED = "[TW-BUSY retry_after_ms=250] waiting set is full: 512 of 512 requests"

Start = Callable[..., Any]


def stream_user(start: Start, triton: FakeTriton, **options: object) -> Any:
    from tidewheel_client.load.users import GrpcStreamUser

    return start(GrpcStreamUser, grpc_url=f"127.0.0.1:{triton.port}", **options)


def http_user(start: Start, http_triton: FakeHttpTriton, **options: object) -> Any:
    from tidewheel_client.load.users import HttpStreamUser

    return start(HttpStreamUser, http_triton.url, **options)


def infer_user(start: Start, http_triton: FakeHttpTriton, **options: object) -> Any:
    from tidewheel_client.load.users import HttpInferUser

    return start(HttpInferUser, http_triton.url, **options)


class Signalling(Timing):
    """Tells the server that the first part of its answer is here."""

    def __init__(self, arrived: threading.Event) -> None:
        super().__init__()
        self._event = arrived

    def arrived(self, num_tokens: int, num_bytes: int) -> None:
        super().arrived(num_tokens, num_bytes)
        self._event.set()


def test_grpc_sees_each_part_as_it_comes(start: Start, triton: FakeTriton) -> None:
    first_is_here = threading.Event()

    def answer(asked: Asked) -> Answer:
        for index, message in enumerate(say_words_over_grpc(asked)):
            assert index == 0 or first_is_here.wait(LIMIT_S)
            yield message

    triton.answer = answer
    user = stream_user(start, triton, prompt_words="4")
    timing = Signalling(first_is_here)
    user.send(user._work.next(), timing)
    assert timing.tpot_ms is not None


def test_sse_sees_each_part_as_it_comes(start: Start, http_triton: FakeHttpTriton) -> None:
    first_is_here = threading.Event()

    def events(body: Body) -> Iterator[Body]:
        for index, event in enumerate(say_words(body)):
            assert index == 0 or first_is_here.wait(LIMIT_S)
            yield event

    http_triton.events = events
    user = http_user(start, http_triton, prompt_words="4")
    timing = Signalling(first_is_here)
    user.send(user._work.next(), timing)
    assert timing.tpot_ms is not None


def test_what_grpc_sends(start: Start, triton: FakeTriton, fired: Any) -> None:
    user = stream_user(start, triton, qos_mix="low", tenants="t", output_tokens="5")
    user.ask()
    (asked,) = triton.asked
    assert asked.message.model_name == "demo"
    assert asked.sampling == {"max_tokens": 5, "ignore_eos": True, "priority": 4, "tenant": "t"}
    assert asked.inputs["stream"] is True
    assert fired.rows() == [
        ("GRPC", "demo low", None),
        ("TTFT", "GRPC demo low", None),
        ("TPOT", "GRPC demo low", None),
    ]


def test_what_sse_sends(start: Start, http_triton: FakeHttpTriton, fired: Any) -> None:
    http_user(start, http_triton, model="m", qos_mix="critical", output_tokens="5").ask()
    ((path, body),) = http_triton.asked
    assert path == "/v2/models/m/generate_stream"
    assert body.pop("text_input")
    assert body == {
        "stream": True,
        "return_num_output_tokens": True,
        "return_finish_reason": True,
        "max_tokens": 5,
        "ignore_eos": True,
        "priority": 1,
    }
    assert [row[0] for row in fired.rows()] == ["SSE", "TTFT", "TPOT"]


def test_what_openai_sends(start: Start, triton: FakeTriton, fired: Any) -> None:
    from tidewheel_client.load.users import OpenAiUser

    with gateway_to(triton.port) as gateway:
        user = start(OpenAiUser, gateway.url, qos_mix="low", output_tokens="5", prompt_words="4")
        user.ask()
        assert triton.asked[0].sampling == {"max_tokens": 5, "ignore_eos": True, "priority": 4, "n": 1}
        triton.answer = refused_over_grpc
        user.ask()
    assert fired.rows()[:3] == [
        ("OPENAI", "demo low", None),
        ("TTFT", "OPENAI demo low", None),
        ("TPOT", "OPENAI demo low", None),
    ]
    assert [(row[0], row[2]) for row in fired.rows()[3:]] == [("OPENAI", "TW-BUSY")]
    assert user.wait_time() >= 0.25


def test_what_infer_sends(start: Start, http_triton: FakeHttpTriton, fired: Any) -> None:
    user = infer_user(start, http_triton, model="m", output_tokens="5")
    user.ask()
    user.ask()
    (path, body), _ = http_triton.asked
    assert path == "/v2/models/m_infer/infer"
    inputs = {tensor["name"]: tensor["data"][0] for tensor in body["inputs"]}
    assert json.loads(inputs["sampling_parameters"]) == {"max_tokens": 5, "ignore_eos": True, "priority": 3}
    assert inputs["exclude_input_in_output"] is True
    assert fired.rows() == [("INFER", "m_infer normal", None)] * 2
    assert {event["response_length"] for event in fired} == {len("an answer")}


def refused_over_grpc(asked: Asked) -> Answer:
    raise Refused(grpc.StatusCode.UNAVAILABLE, TAGGED)
    yield


def broken_off_over_grpc(asked: Asked) -> Answer:
    yield response(asked.message, text_output="so ", finish_reason="None", num_output_tokens=("UINT32", "I", [1]))


@pytest.mark.parametrize(
    ("answer", "label"), [(refused_over_grpc, "TW-BUSY"), (broken_off_over_grpc, "ServerUnavailable")]
)
def test_grpc_failures(
    start: Start, triton: FakeTriton, fired: Any, answer: Callable[[Asked], Answer], label: str
) -> None:
    triton.answer = answer
    user = stream_user(start, triton)
    user.ask()
    triton.answer = None
    user.ask()
    assert fired.rows()[:2] == [("GRPC", "demo normal", label), ("GRPC", "demo normal", None)]


def refused(body: Body) -> Iterator[Body]:
    raise HttpError(400, error_body(TAGGED))
    yield {}


def failed_midway(body: Body) -> Iterator[Body]:
    yield next(say_words(body))
    yield {"error": "[TW-ENGINE-DEAD] the engine process ended"}


def broken_off(body: Body) -> Iterator[Body]:
    yield next(say_words(body))


def no_triton(body: Body) -> Iterator[Body]:
    raise HttpError(502, "<html>bad gateway</html>")
    yield {}


@pytest.mark.parametrize(
    ("events", "label"),
    [
        (refused, "TW-BUSY"),
        (failed_midway, "TW-ENGINE-DEAD"),
        (broken_off, "ServerUnavailable"),
        (no_triton, "RequestError"),
    ],
)
def test_sse_failures(
    start: Start, http_triton: FakeHttpTriton, fired: Any, events: Callable[[Body], Iterator[Body]], label: str
) -> None:
    http_triton.events = events
    user = http_user(start, http_triton, prompt_words="3")
    user.ask()
    http_triton.events = say_words
    user.ask()
    assert fired.rows()[:2] == [("SSE", "demo normal", label), ("SSE", "demo normal", None)]


def test_infer_failures(start: Start, http_triton: FakeHttpTriton, fired: Any) -> None:
    def refuse(body: Body) -> Body:
        raise HttpError(400, error_body(TAGGED))

    http_triton.answer = refuse
    user = infer_user(start, http_triton)
    user.ask()
    assert user.wait_time() == 0.25  # what the refusal asks for
    http_triton.answer = one_answer
    user.ask()
    assert user.wait_time() == 0
    assert [row[2] for row in fired.rows()] == ["TW-BUSY", None]


def test_nobody_there(start: Start, fired: Any) -> None:
    from tidewheel_client.load.users import GrpcStreamUser, HttpInferUser, HttpStreamUser

    for cls in (GrpcStreamUser, HttpStreamUser, HttpInferUser):
        start(cls, "http://127.0.0.1:1", grpc_url="127.0.0.1:1").ask()
    assert [row[2] for row in fired.rows()] == ["ServerUnavailable"] * 3


def test_a_server_that_does_not_answer(start: Start, http_triton: FakeHttpTriton, fired: Any) -> None:
    over = threading.Event()

    def never(body: Body) -> Body:
        over.wait(LIMIT_S)
        return one_answer(body)

    http_triton.answer = never
    infer_user(start, http_triton, request_timeout=0.2).ask()
    over.set()
    assert [row[2] for row in fired.rows()] == ["RequestTimeout"]
