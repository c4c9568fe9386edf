"""Both clients over HTTP, where a Triton without models answers; tests/e2e/test_service.py asks the real one."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tidewheel_client as tc
from support.triton.http_triton import Body, FakeHttpTriton, HttpError, error_body
from support.triton.serving import wait_for
from tidewheel_client import AsyncClient, Client


@pytest.fixture
def triton() -> Iterator[FakeHttpTriton]:
    with FakeHttpTriton() as fake:
        yield fake


@pytest.fixture
def client(triton: FakeHttpTriton) -> Iterator[Client]:
    with Client(triton.url, timeout_s=30) as one:
        yield one


def fail(status: int, text: str) -> Callable[[Body], Iterator[Body]]:
    def events(body: Body) -> Iterator[Body]:
        raise HttpError(status, text)
        yield

    return events


def hold(release: threading.Event) -> Callable[[Body], Iterator[Body]]:
    def events(body: Body) -> Iterator[Body]:
        yield {"text_output": "first ", "finish_reason": "None"}
        release.wait(30)
        yield {"text_output": "last", "finish_reason": "stop"}

    return events


def test_what_is_sent_and_what_comes(client: Client, triton: FakeHttpTriton) -> None:
    answer = client.generate("one two", max_tokens=5, request_id="mine", return_token_ids=True)
    assert (answer.text, answer.finish_reason, answer.num_output_tokens) == ("onetwo", "stop", 2)
    path, body = triton.asked[0]
    assert path == "/v2/models/demo/generate_stream"
    assert json.loads(body.pop("sampling_parameters")) == {"max_tokens": 5}
    assert body == {
        "id": "mine", "text_input": "one two", "stream": False, "exclude_input_in_output": True,
        "return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": True,
        "return_token_ids": True,
    }  # fmt: skip
    triton.events = lambda body: iter([{"text_output": "a", "finish_reason": "stop"}])
    client.generate(input_ids=[3, 4])
    assert triton.asked[1][1]["input_ids"] == [3, 4]


def test_chunks_arrive_one_by_one(client: Client, triton: FakeHttpTriton) -> None:
    release = threading.Event()
    triton.events = hold(release)
    stream = client.stream("x")
    assert next(stream).text == "first "
    release.set()
    assert [chunk.text for chunk in stream] == ["last"]
    assert stream.finish_reason == "stop"


def test_sequences_are_told_apart(client: Client, triton: FakeHttpTriton) -> None:
    two = {
        "text_output": ["a", "b"],
        "finish_reason": ["stop", "length"],
        "num_output_tokens": [0, 1],
        "token_ids": 7,
    }
    triton.events = lambda body: iter([two])
    first, second = client.generate_all("x", n=2, return_token_ids=True)
    assert (first.token_ids, second.token_ids) == ((), (7,))
    assert (first.text, second.finish_reason) == ("a", "length")


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (400, error_body("[TW-BUSY retry_after_ms=250] full"), tc.Busy),
        (400, f"data: {error_body('[TW-INPUT] unknown parameter')}\n\n", tc.InvalidRequest),
        (404, error_body("Request for unknown model: 'x' is not found"), tc.NotFound),
        (404, "nothing here", tc.NotFound),
        (403, "forbidden", tc.Unsupported),
        (503, "", tc.ServerUnavailable),
    ],
)
def test_refusals(
    client: Client, triton: FakeHttpTriton, status: int, text: str, error: type[tc.RequestError]
) -> None:
    triton.events = fail(status, text)
    with pytest.raises(error) as caught:
        client.generate("x")
    assert type(caught.value) is error
    assert "data:" not in caught.value.message


def test_an_error_in_the_stream(client: Client, triton: FakeHttpTriton) -> None:
    text = "[TW-ENGINE-DEAD retry_after_ms=100] the engine process ended"
    triton.events = lambda body: iter([{"text_output": "a", "finish_reason": "None"}, {"error": text}])
    stream = client.stream("x")
    assert next(stream).text == "a"
    with pytest.raises(tc.EngineDead) as caught:
        next(stream)
    assert caught.value.retry_after_ms == 100


def test_a_stream_that_breaks(client: Client, triton: FakeHttpTriton) -> None:
    triton.events = lambda body: iter([{"text_output": "a", "finish_reason": "None"}])
    with pytest.raises(tc.ServerUnavailable, match="before its last response"):
        client.generate("x")


def test_a_refusal_is_tried_again(triton: FakeHttpTriton) -> None:
    refusals = iter([fail(400, error_body("[TW-BUSY retry_after_ms=1] full"))])
    triton.events = lambda body: next(refusals, lambda _: iter([{"text_output": "a", "finish_reason": "stop"}]))(body)
    with Client(triton.url, retries=1) as client:
        assert client.generate("x").text == "a"
    assert len(triton.asked) == 2


def test_a_cancel_wakes_the_reader(client: Client, triton: FakeHttpTriton) -> None:
    release = threading.Event()
    triton.events = hold(release)
    stream = client.stream("x")
    next(stream)
    canceller = threading.Timer(0.05, stream.cancel)
    canceller.start()
    assert list(stream) == []
    assert stream.finish_reason is None
    release.set()
    assert client.generate("y").text == "first last"


def test_a_time_limit(client: Client, triton: FakeHttpTriton) -> None:
    release = threading.Event()
    triton.events = hold(release)
    with pytest.raises(tc.RequestTimeout):
        client.generate("x", timeout_s=0.2)
    release.set()


def test_no_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Client(url) as client, pytest.raises(tc.ServerUnavailable, match=f"no server answers at {url}"):
            client.generate("x")


@pytest.mark.parametrize("url", ["http://[::", "http://a:b"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(tc.InvalidRequest, match="no address"):
        Client(url)


def test_credentials_are_grpcs(triton: FakeHttpTriton) -> None:
    import grpc

    with pytest.raises(tc.InvalidRequest, match="https in place of http"):
        Client(triton.url, credentials=grpc.ssl_channel_credentials())


def test_the_asynchronous_client(triton: FakeHttpTriton) -> None:
    release = threading.Event()

    async def main() -> None:
        async with AsyncClient(triton.url, headers=[("X-Key", "k")]) as client:
            answers = await asyncio.gather(*(client.generate(f"say {index}") for index in range(8)))
            assert [answer.text for answer in answers] == [f"say{index}" for index in range(8)]
            triton.events = hold(release)
            stream = client.stream("x")
            await anext(stream)
            asyncio.get_running_loop().call_later(0.05, stream.cancel)
            assert [chunk async for chunk in stream] == []
            with pytest.raises(tc.RequestTimeout):
                await client.generate("x", timeout_s=0.2)
            reader = asyncio.create_task(client.generate("x"))
            await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            release.set()

    asyncio.run(main())


def test_a_mock_of_what_a_gateway_in_front_may_say(client: Client, triton: FakeHttpTriton) -> None:
    triton.events = fail(502, "<html>bad gateway</html>")
    with pytest.raises(tc.ServerUnavailable, match="bad gateway"):
        client.generate("x")


def test_body_values_that_json_has_not(client: Client, triton: FakeHttpTriton) -> None:
    values: Any = {"temperature": float("nan")}
    client.generate("x", **values)
    assert triton.asked[0][1]["sampling_parameters"] == '{"temperature": NaN}'


def test_closing_the_client_wakes_a_reader(triton: FakeHttpTriton) -> None:
    release = threading.Event()
    triton.events = hold(release)
    client = Client(triton.url)
    stream = client.stream("x")
    next(stream)
    loop = client._core._transport._loop

    def is_read() -> bool:
        return any(getattr(task.get_coro(), "__name__", "") == "receive" for task in asyncio.all_tasks(loop))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(next, stream)
        try:
            wait_for(is_read, 60, "the read")
            client.close()
            assert isinstance(reading.exception(60), tc.RequestError)
        finally:
            release.set()


def test_an_answer_of_something_else(client: Client, triton: FakeHttpTriton) -> None:
    triton.answer_page = "<html>welcome</html>"
    with pytest.raises(tc.ServerUnavailable, match="does not answer as Triton does"):
        client.generate("x")
    with pytest.raises(tc.ServerUnavailable, match="does not answer as Triton does"):
        client.streaming_models()


def test_a_stream_that_is_dropped_ends_its_request(triton: FakeHttpTriton) -> None:
    async def read_one(client: AsyncClient) -> None:
        async for _ in client.stream("one two three"):
            return

    async def run() -> None:
        async with AsyncClient(triton.url) as client:
            await read_one(client)
            gc.collect()
            async with asyncio.timeout(30):
                while len(asyncio.all_tasks()) > 1:
                    await asyncio.sleep(0)

    asyncio.run(run())
    gc.collect()  # what is left pending is reported
