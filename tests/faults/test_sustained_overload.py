"""Five times what the server can do, for a minute, or for `OVERLOAD_S` seconds."""

from __future__ import annotations

import heapq
import json
import os
import random
import re
import time
from collections import Counter
from contextlib import ExitStack

import pytest

from faults.conftest import Case
from support.faults.nothing_lost import CANARIES, Recorded
from support.faults.service import MAX_RUNNING, MAX_WAITING
from support.triton.burst import Burst, bursting
from support.triton.serving import Server

SECONDS = float(os.environ.get("OVERLOAD_S", "60"))

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300 + 2 * SECONDS)]

TIMES = 5
NUM_TOKENS = 100
MAX_TRIES = 4
LEAST_SHARE = 0.5  # of the goodput without overload: other programs may slow the machine down meanwhile
SPARE_S = 60.0  # over the time that the waiting set takes
SHARES = {1: 0.05, 2: 0.1, 3: 0.85}  # of arrivals, by priority


def test_clients_that_come_again_are_served_as_fast_as_without_overload(
    server: Server, recorded: Recorded, case: Case
) -> None:
    with case(spare_bytes=192 << 20) as canaries:
        canaries.finish()
        peak = requests_per_s(server)
        with ExitStack() as opened:
            callers = {priority: Callers(opened.enter_context(bursting(server)), priority) for priority in SHARES}
            run(callers, TIMES * peak)
            for caller in callers.values():
                caller.finish(recorded)
        peak = min(peak, requests_per_s(server))
        assert sum(caller.num_in_time for caller in callers.values()) / SECONDS > LEAST_SHARE * peak
        assert all(caller.num_in_time for caller in callers.values()), "a class starves"
        longest = max(caller.longest_s for caller in callers.values())
        assert longest < (MAX_WAITING + MAX_RUNNING) / (LEAST_SHARE * peak) + SPARE_S


def requests_per_s(server: Server) -> float:
    """Measure with as many requests at once as can run."""
    begin = time.monotonic()
    with bursting(server) as burst:
        while burst.num_final < 2 * MAX_RUNNING:
            while burst.num_sent - burst.num_final < MAX_RUNNING:
                burst.send(CANARIES[burst.num_sent % len(CANARIES)], NUM_TOKENS)
            burst.receive()
    return 2 * MAX_RUNNING / (time.monotonic() - begin)


class Callers:
    """Clients of one class."""

    def __init__(self, burst: Burst, priority: int) -> None:
        self.longest_s = 0.0  # from a call to its last token
        self.num_in_time = 0  # served while others arrived
        self._burst = burst
        self._parameters = json.dumps({"priority": priority})
        self._sent_at: dict[str, float] = {}

    def call(self) -> None:
        number = self._burst.send(
            CANARIES[self._burst.num_sent % len(CANARIES)], NUM_TOKENS, sampling_parameters=self._parameters
        )
        self._sent_at[number] = time.monotonic()

    def refusals(self) -> list[float]:
        """Read what has come, and return the waits of refused calls, in seconds."""
        before = len(self._burst.errors)
        while not self._burst.answers.empty():
            self._receive()
        self.num_in_time = self._burst.finals.total()
        return [retry_after_s(error) for error in self._burst.errors[before:]]

    def finish(self, recorded: Recorded) -> None:
        while self._burst.num_final < self._burst.num_sent:
            self._receive()
        assert set(self._burst.finals.values()) == {1}
        assert self._burst.finals.total() + len(self._burst.errors) == self._burst.num_sent
        for number in self._burst.finals:
            assert self._burst.tokens[number] == recorded[CANARIES[int(number) % len(CANARIES)]][:NUM_TOKENS]

    def _receive(self) -> None:
        known = self._burst.finals.total()
        self._burst.receive()
        if self._burst.finals.total() > known:
            number = next(reversed(self._burst.finals))
            self.longest_s = max(self.longest_s, time.monotonic() - self._sent_at[number])


def retry_after_s(error: str) -> float:
    found = re.match(r"\[TW-(?:BUSY|KV-FULL) retry_after_ms=(\d+)\] ", error)
    assert found is not None, error
    return int(found[1]) / 1000


def run(callers: dict[int, Callers], rate: float) -> None:
    """Let new calls arrive at this rate, whatever becomes of the others; refused ones come again, up to a limit."""
    arrivals, tries = random.Random(25), Counter[int]()
    start = time.monotonic()
    end, due = start + SECONDS, [(start, priority) for priority in callers]
    next_arrival = start
    while time.monotonic() < end:
        while next_arrival <= time.monotonic():
            (priority,) = arrivals.choices(list(SHARES), list(SHARES.values()))
            heapq.heappush(due, (next_arrival, priority))
            next_arrival += arrivals.expovariate(rate)
        while due and due[0][0] <= time.monotonic():
            callers[heapq.heappop(due)[1]].call()
        for priority, caller in callers.items():
            for wait_s in caller.refusals():
                tries[priority] += 1
                if tries[priority] % MAX_TRIES:  # one in so many gives up
                    heapq.heappush(due, (time.monotonic() + wait_s, priority))
        time.sleep(0.005)
