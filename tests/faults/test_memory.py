"""A KV cache that is too small for what runs, prompts that it can never hold, and prompts too big anywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.conftest import Case
from support.faults.nothing_lost import (
    CANARIES,
    CANARY_TOKENS,
    SPARE_BYTES,
    Footprint,
    Recorded,
    assert_survived,
    record,
    streaming_canaries,
)
from support.faults.service import BLOCK_SIZE, NUM_BLOCKS, serving
from support.triton.burst import bursting
from support.triton.serving import Server, StreamError, grpc_inputs, grpc_stream, wait_for

pytestmark = pytest.mark.e2e

NUM_LONG = 80
LONG_PROMPT_BYTES = 2_000_000
HUGE_BYTES = 200 << 20
INHERITED_DESCRIPTORS = 40  # of tritonserver, when a front end starts later than it
LIMIT_S = 180.0


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


def test_many_requests_leave_no_memory(server: Server, case: Case) -> None:
    """Prompts are refused and served by turns."""
    assert NUM_LONG * LONG_PROMPT_BYTES > 1.5 * SPARE_BYTES
    with case(), bursting(server) as burst:
        for number in range(NUM_LONG):
            burst.send("x" * LONG_PROMPT_BYTES, 2)
            burst.send("word " * 500, 2)
            if number % 4 == 3:
                burst.finish()
        assert len(burst.errors) == NUM_LONG


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
def test_a_prompt_of_200_megabytes_is_refused_beside_others(tmp_path: Path, recorded: Recorded) -> None:
    """Its shared memory is given back with its front end, which is replaced; a new one has inherited descriptors.

    The server has had no request that Triton refuses, no stream stays open, and none was cancelled as it ended: each
    would keep the front end.
    """
    with serving(tmp_path) as server:
        assert record(server) == recorded
        before = Footprint.of(server)
        with refused_beside(server, "x" * HUGE_BYTES), streaming_canaries(server) as beside:
            assert_survived(beside, recorded)
        wait_for(lambda: Footprint.of(server).shared_memory <= before.shared_memory, LIMIT_S, "shared memory back")
        with streaming_canaries(server) as later:
            assert_survived(later, recorded)
        before.assert_back(server, HUGE_BYTES, INHERITED_DESCRIPTORS)
