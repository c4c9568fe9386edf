"""Requests that are sent again, many at a time, and the transports of users' own tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tidewheel_client as tc
from tidewheel_client import Ask, AsyncClient, Chunk, Client, MockTransport
from tidewheel_client import stream as streams
from tidewheel_client.stream import retry_wait_s
from tidewheel_client.transport import Answer


def client_with(answer: Callable[[Ask], Answer], **arguments: Any) -> tuple[Client, MockTransport]:
    transport = MockTransport(answer)
    return Client(transport=transport, **arguments), transport


def text_of(ask: Ask) -> str:
    return str(ask.prompt["text_input"])


class Once:
    """Fails so often, then answers."""

    def __init__(self, *errors: tc.RequestError) -> None:
        self._errors = list(errors)

    def __call__(self, ask: Ask) -> Answer:
        return self._errors.pop(0) if self._errors else f"answer to {text_of(ask)}"


def busy(retry_after_ms: int | None = 0) -> tc.Busy:
    return tc.Busy("full", retry_after_ms=retry_after_ms)


def test_a_refusal_is_tried_again_and_then_told() -> None:
    client, transport = client_with(Once(busy(), busy()), retries=2)
    assert client.generate("x").text == "answer to x"
    assert len(transport.asked) == 3
    assert len({ask.request_id for ask in transport.asked}) == 1
    client, transport = client_with(Once(busy(), busy(), busy()), retries=2)
    with pytest.raises(tc.Busy):
        client.generate("x")
    assert len(transport.asked) == 3


def test_only_what_may_succeed_is_tried_again() -> None:
    for error in (tc.InvalidRequest("no"), tc.DeadlineExceeded("late"), tc.InternalError("bug")):
        client, transport = client_with(Once(error), retries=5)
        with pytest.raises(type(error)):
            client.generate("x")
        assert len(transport.asked) == 1


def test_an_answer_that_has_begun_is_not_asked_for_again() -> None:
    transport = MockTransport(lambda ask: "never")
    transport.open = lambda ask, timeout_s: _Breaking()  # type: ignore[method-assign,assignment,return-value]
    stream = Client(transport=transport, retries=5).stream("x")
    assert next(stream).text == "half"
    with pytest.raises(tc.EngineDead):
        next(stream)


class _Breaking:
    """Responses of a server that dies after the first."""

    def __init__(self) -> None:
        self._has_begun = False

    async def receive(self) -> list[Chunk]:
        if self._has_begun:
            raise tc.EngineDead("gone")
        self._has_begun = True
        return [Chunk(text="half")]

    def cancel(self) -> None: ...

    async def close(self) -> None: ...


def test_the_server_says_how_long_to_wait() -> None:
    assert 0.4 <= (retry_wait_s(busy(400), 0, None) or 0) <= 0.5
    assert 0.2 <= (retry_wait_s(busy(None), 1, None) or 0) <= 0.25
    assert retry_wait_s(busy(400), 0, 0.3) is None


def test_a_cancel_ends_the_wait_for_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    client, transport = client_with(Once(busy(60_000)), retries=1)

    def watched(*given: Any) -> float | None:
        waiting.set()
        return retry_wait_s(*given)

    monkeypatch.setattr(streams, "retry_wait_s", watched)
    stream = client.stream("x")
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, stream)
        assert waiting.wait(60)
        stream.cancel()
        assert rest.result(timeout=60) == []
    assert len(transport.asked) == 1


def test_a_session_that_cannot_be_closed_hides_no_error() -> None:
    client, _ = client_with(lambda ask: tc.EngineDead("gone"))
    with pytest.raises(ZeroDivisionError), client.session():
        raise ZeroDivisionError
    with pytest.raises(tc.EngineDead), client.session():
        pass
    client, _ = client_with(lambda ask: tc.NotFound("expired"))
    with client.session():
        pass


def test_asynchronous_retries() -> None:
    async def test() -> None:
        transport = MockTransport(Once(busy(), tc.ServerUnavailable("gone")))
        async with AsyncClient(transport=transport, retries=3) as client:
            assert await client.is_ready()
            assert (await client.generate("x")).text == "answer to x"
        assert len(transport.asked) == 3

    asyncio.run(test())


def test_map_answers_in_order_with_a_bounded_number_at_a_time() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def answer(ask: Ask) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        text = text_of(ask).upper()
        with lock:
            running -= 1
        return text

    client, _ = client_with(answer)
    prompts = [f"p{number}" for number in range(50)]
    assert [one.text for one in client.map(prompts, concurrency=3)] == [prompt.upper() for prompt in prompts]
    assert most <= 3


def test_map_takes_prompts_messages_and_arguments() -> None:
    client, transport = client_with(lambda ask: "a")
    items = ["text", [{"role": "user", "content": "hi"}], {"prompt": "own", "max_tokens": 7}]
    assert len(list(client.map(items, concurrency=1, max_tokens=5))) == 3
    one, two, three = transport.asked
    assert (one.prompt, one.params) == ({"text_input": "text"}, {"max_tokens": 5})
    assert "messages" in two.prompt
    assert (three.prompt, three.params) == ({"text_input": "own"}, {"max_tokens": 7})


def fails_at(number: int) -> Callable[[Ask], Answer]:
    return lambda ask: tc.InvalidRequest("bad") if text_of(ask) == str(number) else text_of(ask)


def test_map_ends_at_an_error_or_returns_it() -> None:
    prompts = [str(number) for number in range(1000)]
    client, transport = client_with(fails_at(2))
    with pytest.raises(tc.InvalidRequest):
        list(client.map(prompts, concurrency=2))
    assert len(transport.asked) < len(prompts)
    results = list(client.map(prompts[:5], concurrency=2, return_errors=True))
    assert [type(one).__name__ for one in results] == ["Completion"] * 2 + ["InvalidRequest"] + ["Completion"] * 2


def test_a_concurrency_below_one_is_refused() -> None:
    client, _ = client_with(lambda ask: "a")
    with pytest.raises(ValueError, match="concurrency is 0"):
        list(client.map(["x"], concurrency=0))


def test_map_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    client, _ = client_with(lambda ask: "a")
    assert len(list(client.map(["x"] * 7, progress=True))) == 7
    assert "7/7" in capsys.readouterr().err
    list(client.map(["x"]))
    assert capsys.readouterr().err == ""


def test_asynchronous_map() -> None:
    async def test() -> None:
        prompts = [str(number) for number in range(200)]
        async with AsyncClient(transport=MockTransport(fails_at(100))) as client:
            results = [one async for one in client.map(prompts, concurrency=4, return_errors=True)]
            assert isinstance(results[100], tc.InvalidRequest)
            assert [one.text for one in results if isinstance(one, tc.Completion)] == prompts[:100] + prompts[101:]
            with pytest.raises(tc.InvalidRequest):
                async for _ in client.map(prompts, concurrency=4):
                    pass
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(test())


def test_a_mock_gives_texts_parts_chunks_and_errors() -> None:
    parts = ["one ", Chunk(text="two", finish_reason="length", num_output_tokens=2)]
    client, transport = client_with(lambda ask: parts)
    with client.stream("x", temperature=0.5) as stream:
        assert [chunk.text for chunk in stream] == ["one ", "two"]
        assert stream.finish_reason == "length"
    assert transport.asked[0].params == {"temperature": 0.5}
    assert client.is_ready()
    with pytest.raises(tc.Unsupported, match="ServerMetadata"):
        client.metadata()

    def raising(ask: Ask) -> Answer:
        raise tc.NotFound("no such session")

    with pytest.raises(tc.NotFound):
        client_with(raising)[0].generate("x")
