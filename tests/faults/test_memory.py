"""A KV cache that is too small for what runs, prompts that it can never hold, and prompts too big anywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from faults.conftest import Case
from support.faults.nothing_lost import (
    CANARIES,
    CANARY_TOKENS,
    Footprint,
    Recorded,
    assert_survived,
    streaming_canaries,
)
from support.faults.service import BLOCK_SIZE, NUM_BLOCKS
from support.triton.burst import bursting
from support.triton.serving import Server, StreamError, grpc_inputs, grpc_stream

pytestmark = pytest.mark.e2e

HUGE_BYTES = 200 << 20


def test_more_than_the_cache_holds_is_preempted_and_exact(server: Server, recorded: Recorded, case: Case) -> None:
    count = 64
    prompts = [CANARIES[index % len(CANARIES)] for index in range(count)]
    assert count * CANARY_TOKENS > 1.5 * NUM_BLOCKS * BLOCK_SIZE
    before = server.metric("vllm:num_preemptions_total")
    with case(), bursting(server) as burst:
        for prompt in prompts:
            burst.send(prompt, CANARY_TOKENS)
        burst.finish()
        assert burst.errors == []
        assert list(burst.tokens.values()) == [recorded[prompt] for prompt in prompts]
    assert server.metric("vllm:num_preemptions_total") > before


def test_what_never_fits_is_refused_at_once(server: Server, case: Case) -> None:
    """One prompt is longer than the context, one than all prompts may be; those behind them do not wait."""
    with case(), bursting(server) as burst:
        for prompt in ("word " * 3000, "x" * 10_000_000):
            burst.send(prompt, 10)
        burst.send("The server", 10)
        burst.finish()
        assert [len(tokens) for tokens in burst.tokens.values()] == [0, 0, 10]
        assert all(error.startswith("[TW-TOO-LARGE]") for error in burst.errors)


@contextmanager
def refused_beside(server: Server, text: str) -> Iterator[None]:
    """Send a prompt that is refused, while the block runs."""
    errors: list[str] = []

    def send() -> None:
        try:
            grpc_stream(server, grpc_inputs(text))
        except StreamError as error:
            errors.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert [error.partition(" ")[0] for error in errors] == ["[TW-TOO-LARGE]"]
    assert "max_prompt_bytes" in errors[0]


@pytest.mark.slow
def test_a_prompt_of_200_megabytes_is_refused_beside_others(server: Server, recorded: Recorded, case: Case) -> None:
    """Triton keeps the shared memory of the largest one (docs/proxy.md): no more with a second."""
    huge = "x" * HUGE_BYTES
    with (
        case(spare_bytes=HUGE_BYTES + (96 << 20)),
        refused_beside(server, huge),
        streaming_canaries(server) as beside,
    ):
        assert_survived(beside, recorded)
    before = Footprint.of(server)
    with case(), refused_beside(server, huge):
        pass
    assert Footprint.of(server).shared_memory <= before.shared_memory
