"""The prefix cache of the running server: whose blocks a prompt finds, by the metric."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest

from faults.conftest import Case
from support.faults.planted import Fault
from support.triton.serving import Server, StreamError, grpc_inputs, grpc_stream, wait_for

pytestmark = pytest.mark.e2e

HITS = "tidewheel_kv_hit_tokens_total"
QUERIES = "tidewheel_kv_queried_tokens_total"
LIMIT_S = 180.0
LONGER = 4  # times a prompt: more than those of all canaries
_numbers = itertools.count(100)


def own_prompt() -> list[int]:
    """Return ids that no other request has."""
    number = next(_numbers)
    return [number % 1000 + 8, 9, *([number] * 62)]


@pytest.fixture
def hits(server: Server) -> Callable[..., float]:
    """Return how many tokens of a prompt were found, asked for with these parameters."""
    is_settled = False

    def settle() -> None:
        """Wait until earlier requests are counted: they come with those of a longer prompt, at the latest."""
        queried = server.metric(QUERIES)
        grpc_stream(server, grpc_inputs(input_ids=own_prompt() * LONGER, max_tokens=1))
        wait_for(lambda: server.metric(QUERIES) - queried >= len(own_prompt()) * LONGER, LIMIT_S, "the count")

    def ask(prompt: list[int], **parameters: str) -> float:
        nonlocal is_settled
        if not is_settled:
            settle()
            is_settled = True
        before, queried = server.metric(HITS), server.metric(QUERIES)
        inputs = grpc_inputs(input_ids=prompt, max_tokens=2, sampling_parameters=json.dumps(parameters))
        try:
            grpc_stream(server, inputs)
        except StreamError as error:
            assert str(error).startswith("[TW-NUMERIC]"), error
        wait_for(lambda: server.metric(QUERIES) - queried == len(prompt), LIMIT_S, "the count of the prompt")
        return server.metric(HITS) - before

    return ask


def test_no_tenant_and_no_salt_finds_blocks_of_another(case: Case, hits: Callable[..., float]) -> None:
    with case() as canaries:
        canaries.finish()
        prompt = own_prompt()
        alice = {"tenant": "alice", "cache_salt": "a"}
        assert hits(prompt, **alice) == 0
        assert hits(prompt, **alice) > 0
        for other in (
            {"tenant": "bob", "cache_salt": "a"},
            {"tenant": "alice", "cache_salt": "b"},
            {"cache_salt": "a"},
        ):
            assert hits(prompt, **other) == 0, other
            assert hits(prompt, **other) > 0, other
        assert hits(prompt) == 0


def test_a_prompt_whose_logits_are_not_finite_leaves_no_block(case: Case, hits: Callable[..., float]) -> None:
    with case() as canaries:
        canaries.finish()
        prompt = Fault.NOT_FINITE.prompt(after=0, length=64)
        assert [hits(prompt) for _ in range(3)] == [0, 0, 0]
