"""More than the server can take: it says so at once, and what it took is served."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from faults.conftest import Case
from support.faults.nothing_lost import CANARIES, Recorded
from support.faults.raw_streams import RawStream
from support.faults.service import MAX_RUNNING, MAX_WAITING, all_at_once
from support.triton.burst import Burst, bursting
from support.triton.serving import Server, wait_for

pytestmark = pytest.mark.e2e

NUM_TOO_MANY = 60
NUM_UNREAD = 64
NUM_IDLE = 500
SLOW_HEADS = (
    b"",
    b"POST /v2/models/demo/gen",
    b"POST /v2/models/demo/generate HTTP/1.1\r\nContent-Length: 90\r\n\r\n{",
)


def test_a_full_waiting_set_refuses_the_rest(server: Server, recorded: Recorded, case: Case) -> None:
    with case(), bursting(server) as burst:
        num_sent = MAX_RUNNING + MAX_WAITING + NUM_TOO_MANY
        prompts = [CANARIES[index % len(CANARIES)] for index in range(num_sent)]
        with all_at_once(server, num_sent):
            for prompt in prompts:
                burst.send(prompt, 40)
        burst.finish()
        assert 0 < len(burst.errors) <= num_sent - MAX_WAITING
        assert all(re.match(r"\[TW-BUSY retry_after_ms=\d+\] waiting set is full", error) for error in burst.errors)
        lengths = Counter(map(len, burst.tokens.values()))
        assert lengths == {40: num_sent - len(burst.errors), 0: len(burst.errors)}
        for prompt, tokens in zip(prompts, burst.tokens.values(), strict=True):
            assert tokens == recorded[prompt][: len(tokens)]


def test_sequences_of_a_group_are_taken_or_refused_together(server: Server, case: Case) -> None:
    """Each stands for 16 places."""
    with case(), bursting(server) as burst:
        num_groups = 2 + (MAX_RUNNING + MAX_WAITING) // 16
        with all_at_once(server, num_groups):
            for _ in range(num_groups):
                burst.send("A tuple is", 20, n=16)
        burst.finish()
        assert burst.errors
        assert all(error.startswith("[TW-BUSY") for error in burst.errors)
        lengths = Counter(map(len, burst.tokens.values()))
        assert lengths == {16 * 20: num_groups - len(burst.errors), 0: len(burst.errors)}


def test_unread_streams_delay_nobody(server: Server, recorded: Recorded, case: Case) -> None:
    with case() as canaries:
        unread = [RawStream(server, CANARIES[index % len(CANARIES)], 100) for index in range(NUM_UNREAD)]
        canaries.finish()
        with bursting(server) as burst:
            for prompt in CANARIES:
                burst.send(prompt, 20)
            burst.finish()
            assert burst.errors == []
        for index, stream in enumerate(unread):
            assert stream.finish() == recorded[CANARIES[index % len(CANARIES)]][:100]


@contextmanager
def connections(server: Server, heads: tuple[bytes, ...], count: int) -> Iterator[list[socket.socket]]:
    """Open connections, each of which sends the begin of a request."""
    with ExitStack() as opened:
        sockets = []
        for index in range(count):
            sockets.append(opened.enter_context(socket.create_connection(("127.0.0.1", server.http_port))))
            sockets[-1].sendall(heads[index % len(heads)])
        yield sockets


def test_idle_and_slow_connections_delay_nobody(server: Server, case: Case) -> None:
    with case() as canaries, connections(server, SLOW_HEADS, NUM_IDLE) as slow:
        canaries.finish()
        for one in slow[2 :: len(SLOW_HEADS)]:
            one.sendall(b" ")
        with bursting(server) as burst:
            burst.send("The server", 20)
            burst.finish()
            assert burst.errors == []


@pytest.mark.slow
def test_ten_times_too_much_for_a_while(server: Server, case: Case) -> None:
    """Clients that come again when they are told to: all are served in the end."""
    with case(), bursting(server) as burst:
        num_left = 10 * MAX_WAITING
        while num_left:
            num_left -= served_of(server, burst, min(num_left, 2 * MAX_WAITING))


def served_of(server: Server, burst: Burst, count: int) -> int:
    """Send so many, and return how many were served. The next come when there is room."""
    num_errors = len(burst.errors)
    for _ in range(count):
        burst.send("The server", 8)
    burst.finish()
    assert all(error.startswith("[TW-BUSY retry_after_ms=") for error in burst.errors)
    wait_for(lambda: server.metric("vllm:num_requests_waiting") == 0, 60, "room")
    return count - (len(burst.errors) - num_errors)
