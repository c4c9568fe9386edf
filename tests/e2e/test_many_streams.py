"""Two hundred streams at once: exact, and with flat memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.triton.burst import PROMPTS, Burst
from support.triton.serving import Server, wait_for

pytestmark = pytest.mark.e2e

Reference = Callable[[str, int], tuple[list[int], list[int], str]]

NUM_STREAMS = 200


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
    wait_for(lambda: is_idle(server), 60, "all blocks free")
