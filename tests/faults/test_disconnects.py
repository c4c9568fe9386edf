"""Clients that go away, at every moment of a request: the others read on, and everything is given back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from faults.conftest import Case
from support.faults.nothing_lost import CANARIES, Recorded, check, is_idle
from support.faults.raw_streams import RawStream
from support.faults.service import MAX_RUNNING
from support.triton.burst import bursting
from support.triton.serving import ROOT, Server, wait_for

pytestmark = pytest.mark.e2e

LONG = 900  # tokens: more than are made before the client is gone
LONG_PROMPT = "word " * 500
NUM_CLIENT_STREAMS = 64
NUM_KILLS = 20
LIMIT_S = 180.0
RECEIVED = "tidewheel_requests_received_total"

# A client of many streams, which says when all of them are sent.
CLIENT = """
import sys
from pathlib import Path
from support.triton.burst import Burst
from support.triton.serving import Server

burst = Burst(Server(None, 0, int(sys.argv[1]), 0, Path()))
for index in range(int(sys.argv[2])):
    burst.send("A long story", 900)
burst.receive()
print("streaming", flush=True)
burst.finish()
"""


def num_cancelled(server: Server) -> float:
    return server.metric("vllm:request_success_total", finished_reason="cancelled")


def wait_cancelled(server: Server, count: float) -> None:
    wait_for(lambda: num_cancelled(server) >= count, LIMIT_S, f"{count:g} cancelled requests")


def test_cancelled_grpc_streams(server: Server, case: Case) -> None:
    """More than can run, so that some are cancelled as they wait; some prompts are computed in parts."""
    before, computed = num_cancelled(server), server.metric("vllm:iteration_tokens_total_sum")
    received = server.metric(RECEIVED)
    count = MAX_RUNNING + 8
    with case():
        with bursting(server) as burst:
            for index in range(count):
                burst.send(LONG_PROMPT if index % 4 == 0 else "A long story", LONG)
            wait_for(lambda: server.metric(RECEIVED) >= received + count, LIMIT_S, "all requests")
        wait_cancelled(server, before + count)
    with check("blocks"):
        assert server.metric("vllm:iteration_tokens_total_sum") - computed < count * LONG / 2


def test_streams_cancelled_as_they_end(server: Server, case: Case) -> None:
    """Each of many counts of tokens may be that of the step in which the cancel arrives."""
    with case():
        for count in range(1, 9):
            with bursting(server, num_clients=1) as burst:
                for _ in range(8):
                    burst.send("A long story", count)
                burst.receive()


@pytest.mark.parametrize(
    "prompt", ["A long story", pytest.param(LONG_PROMPT, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_connections_reset_at_once_and_in_the_middle(server: Server, case: Case, prompt: str) -> None:
    before = num_cancelled(server)
    with case():
        for end in (RawStream.reset, RawStream.reset_after_first):
            streams = [RawStream(server, prompt, LONG) for _ in range(8)]
            for stream in streams:
                end(stream)
        wait_cancelled(server, before + 8)


def test_every_tenth_connection_is_reset(server: Server, recorded: Recorded, case: Case) -> None:
    with case():
        prompts = [CANARIES[index % len(CANARIES)] for index in range(MAX_RUNNING * 2)]
        streams = [(prompt, RawStream(server, prompt, 60, id=str(index))) for index, prompt in enumerate(prompts)]
        for _, stream in streams[::10]:
            stream.reset()
        del streams[::10]
        for prompt, stream in streams:
            assert stream.finish() == recorded[prompt][:60]


@pytest.mark.slow
def test_a_connection_that_is_half_closed(server: Server, recorded: Recorded, case: Case) -> None:
    """The client says that it sends no more; it may read on, or find its stream cancelled."""
    with case():
        stream = RawStream(server, CANARIES[0], 60)
        stream.half_close()
        tokens = stream.finish()
        assert tokens == recorded[CANARIES[0]][: len(tokens)]


def killed_client(server: Server) -> None:
    command = [sys.executable, "-c", CLIENT, server.grpc.rpartition(":")[2], str(NUM_CLIENT_STREAMS)]
    with subprocess.Popen(command, cwd=ROOT / "tests", stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        try:
            assert client.stdout.readline() == b"streaming\n"
        finally:
            client.kill()


@pytest.mark.slow
def test_a_client_killed_with_64_streams_many_times(server: Server, case: Case) -> None:
    before = num_cancelled(server)
    with case():
        for number in range(NUM_KILLS):
            killed_client(server)
            wait_cancelled(server, before + number + 1)
            wait_for(lambda: is_idle(server), LIMIT_S, "the end of all streams")


@pytest.mark.slow
@pytest.mark.parametrize("cancel", [RawStream.reset, RawStream.half_close])
def test_connections_that_end_while_they_wait(
    server: Server, case: Case, cancel: Callable[[RawStream], None]
) -> None:
    with case():
        streams = [RawStream(server, "A long story", 200) for _ in range(MAX_RUNNING * 2)]
        for stream in streams[MAX_RUNNING:]:
            cancel(stream)
        for stream in streams[:MAX_RUNNING]:
            stream.finish()
