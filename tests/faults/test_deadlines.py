"""Deadlines: past, far off, in the queue and in the middle; each holds, and costs nothing."""

from __future__ import annotations

import json
import time

import pytest

from faults.conftest import Case
from support.faults.service import MAX_RUNNING
from support.triton.burst import bursting
from support.triton.serving import Server, wait_for

pytestmark = pytest.mark.e2e

TEN_YEARS_MS = 10 * 365 * 24 * 3600 * 1000.0
PATIENCE_S = 120.0  # of a busy machine, over a deadline


def deadline(milliseconds: float) -> str:
    return json.dumps({"deadline_ms": milliseconds})


def num_open(server: Server) -> float:
    """Return how many requests the engine has."""
    return sum(server.metric(f"vllm:num_requests_{state}") for state in ("running", "waiting"))


def test_a_deadline_that_passes_in_the_queue_costs_nothing(server: Server, case: Case) -> None:
    with case(), bursting(server) as running, bursting(server) as waiting:
        for _ in range(2 * MAX_RUNNING):
            running.send("A long story", 900)
        wait_for(lambda: num_open(server) >= 2 * MAX_RUNNING, PATIENCE_S, "a full server")
        prefilled = server.metric("vllm:prompt_tokens_total")
        began = time.monotonic()
        for _ in range(8):
            waiting.send("word " * 400, 10, sampling_parameters=deadline(200))
        waiting.finish()
        assert time.monotonic() - began < PATIENCE_S
        assert len(waiting.errors) == 8
        assert all(error.startswith("[TW-DEADLINE]") for error in waiting.errors)
        assert server.metric("vllm:prompt_tokens_total") - prefilled < 400


def test_a_deadline_in_the_middle_ends_with_what_there_is(server: Server, case: Case) -> None:
    with case(), bursting(server) as burst:
        began = time.monotonic()
        for _ in range(8):
            burst.send("A long story", 1000, sampling_parameters=deadline(1500))
        burst.finish()
        assert time.monotonic() - began < PATIENCE_S
        assert all(error.startswith("[TW-DEADLINE]") for error in burst.errors)
        assert all(len(tokens) < 1000 for tokens in burst.tokens.values())


@pytest.mark.parametrize("deadline_ms", [0.0, -1.0, float("nan"), float("inf"), -float("inf")])
def test_no_deadline(server: Server, deadline_ms: float) -> None:
    with bursting(server, num_clients=1) as burst:
        burst.send("Hello", 4, sampling_parameters=deadline(deadline_ms))
        burst.finish()
        (error,) = burst.errors
        assert error.startswith("[TW-INPUT] deadline_ms"), error


def test_a_deadline_in_ten_years(server: Server) -> None:
    with bursting(server, num_clients=1) as burst:
        burst.send("Hello", 4, sampling_parameters=deadline(TEN_YEARS_MS))
        burst.finish()
        assert burst.errors == []
