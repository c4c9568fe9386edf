"""The threads around requests: those that work through queues, and the one that ends requests from outside."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from support.engine.fake_engine import RecordingSink
from support.frontend.front_ends import delta
from tidewheel.frontend.live_request import LiveRequest
from tidewheel.frontend.request_figures import TTFT_BOUNDS, StatsRecorder, token_bounds
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.threads import Watcher, Workers
from tidewheel.request_options import RequestOptions
from tidewheel.stats import Histogram


class CountingSink(RecordingSink):
    num_asked = 0

    def is_cancelled(self) -> bool:
        self.num_asked += 1
        return super().is_cancelled()


class BrokenSink(RecordingSink):
    def is_cancelled(self) -> bool:
        raise OSError("no server")


class Watched:
    """A watcher that asks only when a test polls, over requests with keys from 0 on."""

    def __init__(self, *sinks: RecordingSink, interval_s: float = 3600) -> None:
        self.requests = [make_request(sink, key) for key, sink in enumerate(sinks)]
        self.live = {request.key: request for request in self.requests}
        self.cancelled: list[LiveRequest] = []
        self.expired: SimpleQueue[LiveRequest] = SimpleQueue()
        self.watcher = Watcher(self.live, self.cancelled.append, self.expire, interval_s=interval_s)

    def expire(self, request: LiveRequest) -> None:
        self.expired.put(request)
        if request.asked.text == "broken":
            raise RuntimeError("a bug")


@pytest.fixture
def opened() -> Iterator[list[Watched]]:
    watched: list[Watched] = []
    yield watched
    for one in watched:
        one.watcher.close()
        assert not one.watcher._thread.is_alive()


def make_request(sink: RecordingSink, key: int = 1, text: str = "x") -> LiveRequest:
    return LiveRequest(key, GenerateRequest(text=text, arrival_ns=1), sink, RequestOptions())


def test_a_round_stops_when_its_time_is_up_and_the_next_goes_on(opened: list[Watched]) -> None:
    sinks = [CountingSink() for _ in range(5)]
    opened.append(watched := Watched(*sinks))
    watched.watcher.poll(3600)  # the first sweep begins behind it
    for expected in ([1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]):
        watched.watcher.poll(0)
        assert [sink.num_asked for sink in sinks] == expected
    watched.watcher.poll(3600)
    assert [sink.num_asked for sink in sinks] == [1] * 5


def test_clients_that_are_gone_or_cannot_say_are_cancelled(opened: list[Watched]) -> None:
    gone, here, broken = CountingSink(), CountingSink(), BrokenSink()
    gone.gone.set()
    opened.append(watched := Watched(gone, here, broken))
    watched.watcher.poll(3600)
    watched.watcher.poll(3600)
    assert watched.cancelled == [watched.requests[0], watched.requests[2]]


def test_requests_expire_once_and_a_failure_holds_up_no_other(opened: list[Watched]) -> None:
    opened.append(watched := Watched(*[CountingSink() for _ in range(4)]))
    now_ns = time.monotonic_ns()
    watched.live[7] = make_request(CountingSink(), 7, "broken")
    for key, expires_ns in ((7, 1), (0, now_ns + 10**15), (1, now_ns), (2, 1)):
        watched.live[key].expires_ns = expires_ns
    with contextlib.suppress(RuntimeError):
        watched.watcher.expire_due()
    watched.watcher.expire_due()
    assert sorted(watched.expired.get(timeout=30).key for _ in range(3)) == [1, 2, 7]
    assert watched.expired.empty()


def test_a_round_that_fails_is_followed_by_another() -> None:
    watched = Watched(CountingSink(), interval_s=0.001)
    watched.live[7] = make_request(CountingSink(), 7, "broken")
    for key in (7, 0):
        watched.live[key].expires_ns = 1
        assert watched.expired.get(timeout=30).key == key
    watched.watcher.close()


def test_work_that_raises_does_not_end_its_thread() -> None:
    done = threading.Event()

    def work(item: int) -> None:
        if item == 0:
            raise RuntimeError("a bug")
        done.set()

    items: SimpleQueue[int | None] = SimpleQueue()
    workers = Workers("worker", 1, items.get, work)
    for item in (0, 1, None):
        items.put(item)
    assert done.wait(30)
    assert workers.join(30)


def test_threads_end_behind_what_is_queued() -> None:
    seen: list[int] = []
    items: SimpleQueue[int | None] = SimpleQueue()
    workers = Workers("worker", 1, items.get, seen.append)
    for item in (*range(1, 100), None):
        items.put(item)
    assert workers.join(30)
    assert seen == list(range(1, 100))


def test_work_that_blocks_is_reported() -> None:
    gate = threading.Event()
    items: SimpleQueue[int | None] = SimpleQueue()
    workers: Workers[int] = Workers("worker", 1, items.get, lambda _: gate.wait(30) and None)
    items.put(1)
    items.put(None)
    assert not workers.join(0.0)
    gate.set()
    assert workers.join(30)


def test_the_first_ending_counts() -> None:
    request = make_request(RecordingSink())
    assert not request.end("cancelled")  # the engine has not got it
    assert not request.end("stop")
    assert request.claim_turn()
    assert not request.claim_turn()
    assert request.take_output() == ([], "cancelled")
    request.mark_answered()
    assert not request.end_turn()
    assert not request.claim_turn()


def test_nothing_counts_behind_the_end() -> None:
    request = make_request(RecordingSink())
    assert request.receive(delta(1, [5], "length"))
    assert not request.receive(delta(1, [6]))
    assert not request.receive(delta(1, [7], "stop"))
    deltas, ending = request.take_output()
    assert [piece.token_ids for piece in deltas] == [[5]]
    assert ending == "length"


def test_buckets_include_their_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, count=3)
    assert (histogram.counts, histogram.sums) == ([2, 4, 1], [1.5, 7.5, 9.0])


def test_bounds_of_numbers_of_tokens() -> None:
    assert token_bounds(128) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(5) == (1, 2, 5)


def test_a_snapshot_stands_still() -> None:
    recorder = StatsRecorder(128)
    before = recorder.snapshot()
    recorder.received()
    recorder.tokens(1, 0.05, 7)
    assert not any(before.time_to_first_token.counts)
    assert (before.num_received, recorder.snapshot().num_received) == (0, 1)
    assert len(before.time_to_first_token.counts) == len(TTFT_BOUNDS) + 1


def test_imports_without_torch() -> None:
    code = (
        "import tidewheel.frontend.frontend, tidewheel.frontend.output, sys;"
        "print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
