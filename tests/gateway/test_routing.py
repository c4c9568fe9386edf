"""Requests as the router sees them."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from tidewheel.fleet.router import RouteRequest
from tidewheel.gateway import bodies
from tidewheel.gateway.bodies import UpstreamRequest
from tidewheel.gateway.upstreams import Attempt, route_request
from tidewheel.request import Priority
from tidewheel_client import Chunk
from tidewheel_client.answers import PerfMetrics

SYSTEM = "".join(f"Rule {number}: be brief. " for number in range(300))  # more than four chunks


def chat(*texts: str, **fields: object) -> RouteRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return route_request(bodies.read_chat({"messages": messages, **fields}))


def shared(one: RouteRequest, other: RouteRequest) -> int:
    return sum(a == b for a, b in zip(one.chunks, other.chunks, strict=False))


def test_a_later_turn_shares_the_chunks_of_the_turn_before() -> None:
    first, second = chat(SYSTEM), chat(SYSTEM, "yes", "and now? " * 300)
    assert len(first.chunks) >= 4
    assert second.chunks[: len(first.chunks)] == first.chunks
    assert len(second.chunks) > len(first.chunks)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    called = [chat(SYSTEM, tools=tools), chat(SYSTEM, "yes", "go on", tools=tools)]
    assert shared(*called) == len(called[0].chunks)
    assert shared(first, called[0]) == 0  # templates put tools before messages


def test_tenants_and_salts_share_nothing() -> None:
    plain = chat(SYSTEM)
    assert shared(plain, chat(SYSTEM, tenant="acme")) == 0
    assert shared(plain, chat(SYSTEM, cache_salt="s")) == 0
    assert shared(chat(SYSTEM, tenant="a", cache_salt="bc"), chat(SYSTEM, tenant="ab", cache_salt="c")) == 0
    assert chat(SYSTEM, session_id="s", tenant="acme").session == "acme\0s"
    assert chat(SYSTEM, session_id="s", tenant="other").session != "acme\0s"


def test_a_text_and_token_ids() -> None:
    text, ids = "word " * 600, list(range(700))
    route = route_request(bodies.read_completion({"prompt": text}))
    assert (route.num_tokens, len(route.chunks)) == (750, 2)
    route = route_request(bodies.read_completion({"prompt": ids}))
    assert (route.num_tokens, len(route.chunks)) == (700, 2)


def test_a_huge_prompt_is_hashed_in_part() -> None:
    assert len(route_request(bodies.read_completion({"prompt": "x" * 4_000_000})).chunks) == 512


@pytest.mark.parametrize("prompt", [{"input_ids": [2**40]}, {"text_input": "\ud800" * 2000}, {"input_ids": []}])
def test_what_the_backend_refuses_does_no_harm(prompt: dict[str, object]) -> None:
    route = route_request(UpstreamRequest(prompts=[prompt], params={"priority": 9}))
    assert route.priority == Priority.NORMAL and route.num_tokens >= 1


def test_classes() -> None:
    assert chat("a", priority=1).priority == Priority.CRITICAL
    assert chat("a", priority="high").priority == Priority.HIGH
    assert chat("a", priority=0).priority == chat("a").priority == Priority.NORMAL


@pytest.mark.parametrize("ttft_ms", [200, 200.0, "200", "2e2"])
def test_limits_count_from_the_arrival(ttft_ms: object) -> None:
    params = {"ttft_ms": ttft_ms, "deadline_ms": 5000}
    route = route_request(UpstreamRequest(prompts=[{"text_input": "a"}], params=params, begun=100.0))
    assert (route.first_token_due, route.due) == (100.2, 105.0)


@pytest.mark.parametrize("ttft_ms", [None, True, 0, -1, "", "soon", "nan", float("nan"), 10**400, [200], {"ms": 200}])
def test_a_limit_that_the_backend_refuses_does_not_count(ttft_ms: object) -> None:
    route = route_request(UpstreamRequest(prompts=[{"text_input": "a"}], params={"ttft_ms": ttft_ms}))
    assert (route.first_token_due, route.due) == (math.inf, math.inf)


def test_cached_tokens_are_in_the_units_of_the_route() -> None:
    perf = PerfMetrics(**dict.fromkeys(PerfMetrics.__dataclass_fields__, 1) | {"num_cached_tokens": 300})

    def cached_tokens(**last: Any) -> int | None:
        attempt = Attempt(UpstreamRequest(prompts=[{"text_input": "x" * 4000}], params={}))
        assert attempt.route.num_tokens == 1000
        chunks = [Chunk(text="a"), Chunk(text="b", finish_reason="stop", num_input_tokens=400, **last)]
        assert asyncio.run(answered(attempt, chunks)) == [[chunk] for chunk in chunks]
        return attempt.num_cached

    assert cached_tokens(perf=perf) == 750
    assert cached_tokens() is None
    assert cached_tokens(index=1, perf=perf) is None


async def answered(attempt: Attempt, chunks: list[Chunk]) -> list[list[Chunk]]:
    """Return what an attempt yields when each chunk is a response."""
    receive = AsyncMock(side_effect=[*([chunk] for chunk in chunks), None])
    triton = Mock(send=Mock(return_value=Mock(receive=receive)))
    return [response async for response in attempt.send(Mock(triton=triton))]
