"""The asynchronous client, over the same Triton without models."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

import tidewheel_client as tc
from support.triton.grpc_triton import Answer, Asked, FakeTriton, response
from tidewheel_client import AsyncClient, Chunk, Client, codec
from tidewheel_client.async_client import AsyncSession
from tidewheel_client.client import Session
from tidewheel_client.grpc_transport import AsyncGrpcResponses, AsyncGrpcTransport

Test = Callable[[AsyncClient], Coroutine[Any, Any, None]]


@asynccontextmanager
async def client_of(triton: FakeTriton, **arguments: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"127.0.0.1:{triton.port}", timeout_s=30, **arguments) as client:
        yield client


def hold(release: threading.Event) -> Callable[[Asked], Answer]:
    def answer(asked: Asked) -> Answer:
        yield response(asked.message, text_output="first ", finish_reason="None")
        release.wait(30)
        yield response(asked.message, text_output="last", finish_reason="stop")

    return answer


def run(triton: FakeTriton, test: Test) -> None:
    async def with_client() -> None:
        async with client_of(triton) as client:
            await test(client)

    asyncio.run(with_client())


def public(cls: type) -> dict[str, list[str]]:
    methods = inspect.getmembers(cls, inspect.isfunction)
    return {name: list(inspect.signature(function).parameters) for name, function in methods if name[0] != "_"}


@pytest.mark.parametrize(("one", "other"), [(Client, AsyncClient), (Session, AsyncSession)])
def test_both_clients_have_one_surface(one: type, other: type) -> None:
    assert public(one) == public(other)


def test_a_call_is_asked_for_its_iterator_once() -> None:
    class Call:
        num_asked = 0

        def __aiter__(self) -> Call:
            self.num_asked += 1
            return self

        async def __anext__(self) -> None:
            raise StopAsyncIteration

    async def read_twice(call: Call) -> None:
        responses = AsyncGrpcResponses(call, "url")
        assert [await responses.receive(), await responses.receive()] == [None, None]

    asyncio.run(read_twice(call := Call()))
    assert call.num_asked == 1


def test_chunks_arrive_one_by_one(triton: FakeTriton) -> None:
    async def test(client: AsyncClient) -> None:
        stream = client.stream("one two")
        assert await anext(stream) == Chunk(text="one ", num_input_tokens=7, num_output_tokens=1)
        assert stream.finish_reason is None
        assert (await anext(stream)).text == "two"
        assert stream.finish_reason == "stop"
        assert [chunk async for chunk in stream] == []

    run(triton, test)


def test_answers(triton: FakeTriton) -> None:
    async def test(client: AsyncClient) -> None:
        completion = await client.generate("one two", max_tokens=5, request_id="mine")
        assert (completion.text, completion.request_id) == ("one two", "mine")
        assert triton.asked[-1].sampling == {"max_tokens": 5}
        with pytest.raises(tc.InvalidRequest, match="generate_all"):
            await client.generate("one", n=2)
        assert [one.text for one in await client.generate_all("three", n=1)] == ["three"]
        triton.answer = lambda asked: iter([response(asked.message, text_output="a", finish_reason="stop")])
        assert (await client.chat([{"role": "user", "content": "x"}])).text == "a"
        assert "messages" in triton.asked[-1].inputs

    run(triton, test)


def test_embeddings(triton: FakeTriton) -> None:
    triton.answer = lambda asked: iter(
        [response(asked.message, text_output="", finish_reason="stop", embedding=("FP32", "f", [0.5, -0.5]))]
    )

    async def test(client: AsyncClient) -> None:
        assert await client.embed("x") == (0.5, -0.5)
        assert triton.asked[-1].inputs["task"] == "embed"

    run(triton, test)
    with Client(f"127.0.0.1:{triton.port}") as client:
        assert client.embed("x") == (0.5, -0.5)


def test_sessions(triton: FakeTriton, client: Client) -> None:
    triton.answer = lambda asked: iter([response(asked.message, text_output="a", finish_reason="stop")])

    async def test(client: AsyncClient) -> None:
        async with client.session("s", ttl_s=9, tenant="acme") as session:
            await session.generate("one")

    run(triton, test)
    with client.session(ttl_s=9, tenant="acme") as session:
        session.generate("one")
    mine, closing, others, closing_others = (asked.sampling for asked in triton.asked)
    assert mine == {"session_id": "s", "session_ttl_s": 9, "tenant": "acme"}
    assert closing == {"close_session": True, "session_id": "s", "tenant": "acme"}
    assert len(others["session_id"]) == 32
    assert closing_others["session_id"] == others["session_id"]


def test_errors_have_their_classes(triton: FakeTriton) -> None:
    was_cancelled = triton.refuse_and_listen("[TW-BUSY retry_after_ms=5] full")

    async def test(client: AsyncClient) -> None:
        stream = client.stream("x")
        with pytest.raises(tc.Busy):
            await anext(stream)
        assert [chunk async for chunk in stream] == []

    run(triton, test)
    assert was_cancelled == [False]


def test_a_stream_without_its_last_response_is_an_error(triton: FakeTriton) -> None:
    triton.answer = lambda asked: iter([response(asked.message, text_output="half", finish_reason="None")])

    async def test(client: AsyncClient) -> None:
        stream = client.stream("x")
        assert (await anext(stream)).text == "half"
        with pytest.raises(tc.ServerUnavailable, match="last response"):
            await anext(stream)

    run(triton, test)


def test_leaving_the_block_cancels(triton: FakeTriton) -> None:
    release = threading.Event()
    triton.answer = hold(release)

    async def test(client: AsyncClient) -> None:
        async with client.stream("x") as stream:
            assert (await anext(stream)).text == "first "
        assert await asyncio.to_thread(triton.ended.wait, 60)
        with pytest.raises(tc.Cancelled):
            await stream.read()

    run(triton, test)
    release.set()


def test_a_cancel_wakes_the_reader(triton: FakeTriton) -> None:
    release = threading.Event()
    triton.answer = hold(release)

    async def test(client: AsyncClient) -> None:
        stream = client.stream("x")
        await anext(stream)
        rest = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)
        stream.cancel()
        assert await rest is None

    run(triton, test)
    release.set()


def test_a_task_that_is_cancelled_cancels_its_request(triton: FakeTriton) -> None:
    release = threading.Event()
    triton.answer = hold(release)

    async def test(client: AsyncClient) -> None:
        task = asyncio.create_task(client.generate("x"))
        while not triton.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(triton.ended.wait, 60)

    run(triton, test)
    release.set()


@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_connection_ends_its_requests(triton: FakeTriton, stream: bool) -> None:
    release, has_begun = threading.Event(), threading.Event()

    def answer(asked: Asked) -> Answer:
        has_begun.set()
        if not stream:
            release.wait(30)  # the first response would be the whole answer
        yield from hold(release)(asked)

    async def test() -> None:
        transport = AsyncGrpcTransport(f"127.0.0.1:{triton.port}")
        message = codec.encode(tc.Ask(model="demo", request_id="1", prompt={"text_input": "x"}, params={}))
        responses = transport.send(message) if stream else None
        reading = asyncio.create_task(responses.receive() if responses else transport.call("ModelInfer", message))
        await asyncio.to_thread(has_begun.wait, 30)
        if responses:
            await reading
            reading = asyncio.create_task(responses.receive())
            await asyncio.sleep(0)
        await transport.close()
        with pytest.raises(tc.ServerUnavailable, match="connection was closed"):
            await reading

    triton.answer = answer
    try:
        asyncio.run(test())
    finally:
        release.set()


def test_time_limit(triton: FakeTriton) -> None:
    release = threading.Event()
    triton.answer = hold(release)

    async def test(client: AsyncClient) -> None:
        with pytest.raises(tc.RequestTimeout):
            await client.generate("x", timeout_s=0.3)

    run(triton, test)
    release.set()


def test_ready_and_metadata(triton: FakeTriton) -> None:
    async def test(client: AsyncClient) -> None:
        triton.ready = False
        assert not await client.is_ready()
        with pytest.raises(tc.RequestTimeout, match="'demo'"):
            await client.wait_ready(timeout_s=0.2)
        triton.ready = True
        await client.wait_ready(timeout_s=60)
        assert (await client.metadata()).server_version == "2.51.0"
        assert await client.streaming_models() == ("demo", "zebra")

    run(triton, test)


def test_no_server() -> None:
    async def test() -> None:
        async with AsyncClient("127.0.0.1:9", timeout_s=5) as client:
            assert not await client.is_ready()
            with pytest.raises(tc.ServerUnavailable, match="no server answers"):
                await client.generate("x")

    asyncio.run(test())
