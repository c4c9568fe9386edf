"""The threads around requests: who sends, and who asks whether a client is still there."""

from __future__ import annotations

import subprocess
import sys
import threading

from support.fake_engine import RecordingSink
from support.front_ends import delta
from tidewheel.frontend.cancellation import CancellationPoller
from tidewheel.frontend.live import Ending, LiveRequest
from tidewheel.frontend.senders import SenderPool
from tidewheel.frontend.stats import TTFT_BOUNDS, Histogram, StatsRecorder
from tidewheel.frontend.values import GenerateRequest


class CountingSink(RecordingSink):
    num_asked = 0

    def is_cancelled(self) -> bool:
        self.num_asked += 1
        return super().is_cancelled()


class BrokenSink(RecordingSink):
    def is_cancelled(self) -> bool:
        raise OSError("no server")


def make_request(sink: RecordingSink) -> LiveRequest:
    return LiveRequest(1, GenerateRequest(text="x"), sink, arrival_ns=1)


def make_poller(requests: list[LiveRequest], cancelled: list[LiveRequest]) -> CancellationPoller:
    return CancellationPoller(lambda: list(requests), cancelled.append, cancelled.append, interval_s=3600)


def test_a_round_stops_when_its_time_is_up_and_the_next_goes_on() -> None:
    sinks = [CountingSink() for _ in range(5)]
    poller = make_poller([make_request(sink) for sink in sinks], [])
    poller.poll(3600)  # the first sweep begins behind it
    for expected in ([1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]):
        poller.poll(0)
        assert [sink.num_asked for sink in sinks] == expected
    poller.poll(3600)
    assert [sink.num_asked for sink in sinks] == [1] * 5


def test_who_is_gone_is_cancelled_and_so_is_who_cannot_say() -> None:
    gone, here, broken = CountingSink(), CountingSink(), BrokenSink()
    gone.gone.set()
    requests = [make_request(sink) for sink in (gone, here, broken)]
    cancelled: list[LiveRequest] = []
    poller = make_poller(requests, cancelled)
    poller.poll(3600)
    poller.poll(3600)
    assert cancelled == [requests[0], requests[2]]


def test_a_turn_that_raises_does_not_end_its_thread() -> None:
    done = threading.Event()

    def turn(item: int) -> None:
        if item == 0:
            raise RuntimeError("a bug")
        done.set()

    pool = SenderPool(1, turn)
    pool.put(0)
    pool.put(1)
    assert done.wait(30)
    assert pool.close(30)


def test_the_pool_ends_behind_what_is_queued() -> None:
    seen: list[int] = []
    pool = SenderPool(1, seen.append)
    for item in range(1, 100):
        pool.put(item)
    assert pool.close(30)
    assert seen == list(range(1, 100))


def test_a_turn_that_blocks_is_reported() -> None:
    gate = threading.Event()
    pool: SenderPool[int] = SenderPool(1, lambda _: gate.wait(30) and None)
    pool.put(1)
    assert not pool.close(0.0)
    gate.set()


def test_the_first_ending_counts() -> None:
    request = make_request(RecordingSink())
    assert not request.end(Ending("cancelled"))  # the engine has not got it
    assert not request.end(Ending("stop"))
    assert request.claim_turn()
    assert not request.claim_turn()
    assert request.take().ending == Ending("cancelled")
    request.close()
    assert not request.end_turn()
    assert not request.claim_turn()


def test_nothing_counts_behind_the_end() -> None:
    request = make_request(RecordingSink())
    assert request.post(delta(1, [5], "length"))
    assert not request.post(delta(1, [6]))
    assert not request.post(delta(1, [7], "stop"))
    deltas, ending = request.take()
    assert [piece.token_ids for piece in deltas] == [[5]]
    assert ending == Ending("length")


def test_buckets_include_their_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, count=3)
    assert histogram.snapshot() == ((1.0, 2.0), (2, 4, 1), 18.0)


def test_a_snapshot_stands_still() -> None:
    recorder = StatsRecorder()
    before = recorder.snapshot()
    recorder.received()
    assert (before.num_received, recorder.snapshot().num_live) == (0, 1)
    assert len(before.time_to_first_token.counts) == len(TTFT_BOUNDS) + 1


def test_imports_without_torch() -> None:
    code = (
        "import tidewheel.frontend.frontend, tidewheel.frontend.stop, sys;"
        "print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_poller_ends_when_told() -> None:
    poller = make_poller([], [])
    poller.start()
    poller.close()
    assert not poller._thread.is_alive()
