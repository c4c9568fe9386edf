"""More than the server can take: it says so at once, and what it took is served."""

from __future__ import annotations

import queue
import re
import threading
from collections import Counter
from typing import Any

import pytest

from faults.conftest import Case
from support.faults.nothing_lost import CANARIES, Recorded
from support.faults.raw_streams import RawStream, idle_connections
from support.faults.service import MAX_RUNNING, MAX_WAITING, MAX_WAITING_TOKENS, all_at_once
from support.triton.burst import Burst, bursting
from support.triton.serving import Server, wait_for
from tidewheel_process.current_process import raise_descriptor_limit

pytestmark = pytest.mark.e2e

NUM_TOO_MANY = 60
NUM_UNREAD = 64
OVERLOADED = r"\[TW-(BUSY|KV-FULL) retry_after_ms="
LONG_PROMPT = [7] * 1000
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
        assert all(re.match(rf"{OVERLOADED}\d+\] waiting set is full", error) for error in burst.errors)
        lengths = Counter(map(len, burst.tokens.values()))
        assert lengths == {40: num_sent - len(burst.errors), 0: len(burst.errors)}
        for prompt, tokens in zip(prompts, burst.tokens.values(), strict=True):
            assert tokens == recorded[prompt][: len(tokens)]


@pytest.mark.parametrize(
    ("prompt", "count", "full_of"),
    [
        (LONG_PROMPT, 2 * MAX_WAITING_TOKENS // 1000, f"of {MAX_WAITING_TOKENS} tokens, and this prompt has"),
        pytest.param([7, 8], 300, f"of {MAX_WAITING} requests(;|$)", marks=pytest.mark.slow),
    ],
    ids=["tokens", "requests"],
)
def test_each_limit_refuses_where_the_other_would_not(
    server: Server, case: Case, prompt: list[int], count: int, full_of: str
) -> None:
    with case(), bursting(server) as burst:
        with all_at_once(server, count):
            for _ in range(count):
                burst.send(prompt, 4)
        burst.finish()
        assert 0 < len(burst.errors) < count
        assert all(re.match(OVERLOADED, error) and re.search(full_of, error) for error in burst.errors), burst.errors
        assert sorted(map(len, burst.tokens.values())) == [0] * len(burst.errors) + [4] * (count - len(burst.errors))


def test_sequences_of_a_group_are_taken_or_refused_together(server: Server, case: Case) -> None:
    """Each stands for 16 places."""
    with case(), bursting(server) as burst:
        num_groups = 2 + (MAX_RUNNING + MAX_WAITING) // 16
        with all_at_once(server, num_groups):
            for _ in range(num_groups):
                burst.send("A tuple is", 20, n=16)
        burst.finish()
        assert burst.errors
        assert all(re.match(OVERLOADED, error) for error in burst.errors)
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


class Held(queue.Queue[tuple[Any, Any]]):
    """Answers that a client takes only when it is let: until then it reads no more of its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.may_read = threading.Event()

    def put(self, item: tuple[Any, Any], block: bool = True, timeout: float | None = None) -> None:
        self.may_read.wait()
        super().put(item, block, timeout)


@pytest.mark.slow
def test_grpc_streams_of_a_slow_reader_delay_nobody(server: Server, case: Case) -> None:
    with case() as canaries, bursting(server, num_clients=6) as slow:
        slow.answers = held = Held()
        try:
            for _ in slow.clients:
                slow.send("A long story", 60, n=8, sampling_parameters='{"logprobs": 5}')
            canaries.finish()
            with bursting(server) as burst:
                for prompt in CANARIES:
                    burst.send(prompt, 20)
                burst.finish()
                assert burst.errors == []
        finally:
            held.may_read.set()
        slow.finish()
        assert slow.errors == []
        assert {len(tokens) for tokens in slow.tokens.values()} == {8 * 60}


@pytest.mark.slow
@pytest.mark.parametrize("count", [500, 5000])
def test_idle_and_slow_connections_delay_nobody(server: Server, case: Case, count: int) -> None:
    if raise_descriptor_limit() < 2 * count:
        pytest.skip("too few descriptors for so many connections")
    with case(spare_bytes=128 << 20) as canaries, idle_connections(server, count, SLOW_HEADS) as slow:
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
    assert all(re.match(OVERLOADED, error) for error in burst.errors)
    wait_for(lambda: server.metric("vllm:num_requests_waiting") == 0, 180, "room")
    return count - (len(burst.errors) - num_errors)
