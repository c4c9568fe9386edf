"""Two hundred streams at once, cancels among them, and the death of the engine in the middle."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import tritonclient.grpc as grpcclient

from support.triton.burst import GREEDY, PROMPTS, Burst
from support.triton.serving import Server, StreamError, grpc_inputs, grpc_stream, token_ids, wait_for

pytestmark = pytest.mark.e2e

Reference = Callable[[str, int], tuple[list[int], list[int], str]]

NUM_STREAMS = 200


@pytest.fixture
def burst(server: Server) -> Iterator[Burst]:
    one = Burst(server)
    yield one
    one.close()


def num_at_engine(server: Server) -> float:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(server.metric(name, model_name="demo") for name in names)


def is_idle(server: Server) -> bool:
    return num_at_engine(server) == server.metric("vllm:kv_cache_usage_perc", model_name="demo") == 0


def memory(server: Server) -> int:
    return sum(process.memory_info().rss for process in server.descendants())


def run_two_hundred(server: Server, expected: dict[str, list[int]]) -> None:
    burst = Burst(server)
    prompts = {
        burst.send(PROMPTS[i % len(PROMPTS)], 16 + i % 17): PROMPTS[i % len(PROMPTS)] for i in range(NUM_STREAMS)
    }
    burst.finish()
    burst.close()
    assert not burst.errors
    for request_id, prompt in prompts.items():
        count = 16 + int(request_id) % 17
        assert burst.tokens[request_id] == expected[prompt][:count]


def test_two_hundred_streams_exact_and_flat(server: Server, reference: Reference) -> None:
    expected = {prompt: reference(prompt, 32)[1] for prompt in PROMPTS}
    run_two_hundred(server, expected)
    before = memory(server)
    for _ in range(3):
        run_two_hundred(server, expected)
    assert memory(server) - before < 64 << 20
    wait_for(lambda: is_idle(server), 10, "all blocks free")


def test_cancelled_streams_give_their_blocks_back(server: Server) -> None:
    cancelled = server.metric("vllm:request_success_total", finished_reason="cancelled")
    client = grpcclient.InferenceServerClient(server.grpc)
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put(result or error))
    for _ in range(8):
        client.async_stream_infer("demo", grpc_inputs("A long story", stream=True, ignore_eos=True, max_tokens=1000))
    for _ in range(8):
        answers.get(timeout=60)
    client.stop_stream(cancel_requests=True)
    client.close()
    wait_for(lambda: is_idle(server), 10, "blocks of cancelled requests")
    wait_for(
        lambda: server.metric("vllm:request_success_total", finished_reason="cancelled") == cancelled + 8,
        10,
        "cancels in the metrics",
    )


def test_a_closed_sse_connection_cancels(server: Server) -> None:
    body = {"text_input": "A long story", "stream": True, "ignore_eos": True, "max_tokens": 1000}
    response = server.post("demo/generate_stream", body, stream=True)
    next(response.iter_lines())
    response.close()
    wait_for(lambda: is_idle(server), 15, "blocks of a closed SSE stream")


def test_engine_killed_in_the_middle(server: Server, burst: Burst, reference: Reference) -> None:
    for i in range(NUM_STREAMS):
        burst.send(PROMPTS[i % len(PROMPTS)], 900)
    # All of them at the engine: one that came after its death would be held, and served by the next engine.
    wait_for(lambda: num_at_engine(server) == NUM_STREAMS, 60, "all requests at the engine")
    while not any(burst.tokens.values()):
        burst.receive()
    engine = server.engine_process()
    assert engine is not None
    engine.send_signal(signal.SIGKILL)
    burst.finish()
    assert len(burst.errors) == NUM_STREAMS
    assert all(message.startswith("[TW-ENGINE-DEAD") for message in burst.errors)
    assert_served_again(server, reference)
    wait_for(lambda: is_idle(server), 10, "all blocks free")
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def assert_served_again(server: Server, reference: Reference) -> None:
    """The next request works; one that meets the restart may be told to come back."""

    def attempt() -> list[int] | None:
        inputs = grpc_inputs(PROMPTS[0], stream=True, return_token_ids=True, max_tokens=8, **GREEDY)
        try:
            return token_ids(grpc_stream(server, inputs))
        except StreamError as error:
            assert str(error).startswith("[TW-ENGINE-DEAD retry_after_ms=")
            return None

    assert wait_for(attempt, 60, "engine restarted") == reference(PROMPTS[0], 8)[1]
