"""Whose turn it is: first tokens and ends at once, all streams in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.frontend.front_ends import FrontendHarness, RecordingSink, Submitted

FOREVER_MS = 10_000.0


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[FrontendHarness]:
    harness = FrontendHarness(tmp_path, num_senders=1, stream_interval_ms=FOREVER_MS)
    yield harness
    harness.close()


def be_too_much(harness: FrontendHarness) -> None:
    """Make a turn seem so long that streams wait for the whole interval."""
    harness.frontend._senders._interval._turn_s = 1e21


def begin(harness: FrontendHarness, count: int) -> list[Submitted]:
    streams = [harness.submit(stream=True) for _ in range(count)]
    harness.deliver_tokens({key: 5 for key, _ in streams})
    for _, sink in streams:
        sink.wait_chunks(1)
    return streams


def test_what_is_due_comes_token_by_token(harness: FrontendHarness) -> None:
    ((key, sink),) = begin(harness, 1)
    for number, token_id in enumerate(harness.encode("the fox"), start=2):
        harness.deliver_tokens({key: token_id})
        sink.wait_chunks(number)
    assert all(len(chunk.token_ids) == 1 for chunk in sink.chunks)


def test_first_tokens_and_ends_wait_for_no_interval(harness: FrontendHarness) -> None:
    be_too_much(harness)
    (one, other) = begin(harness, 2)
    for token_id in (6, 7, 8):
        harness.deliver_tokens({one.key: token_id, other.key: token_id})
    harness.deliver(one.key, [9], "length")
    one.sink.wait_end()
    assert [chunk.token_ids for chunk in one.sink.chunks] == [[5], [6, 7, 8, 9]]
    assert [chunk.token_ids for chunk in other.sink.chunks] == [[5]]


def test_more_tokens_than_a_row_holds_wait_in_their_order(harness: FrontendHarness) -> None:
    be_too_much(harness)
    ((key, sink),) = begin(harness, 1)
    for token_id in range(100, 300):
        harness.deliver_tokens({key: token_id})
    harness.deliver(key, [], "length")
    sink.wait_end()
    assert sink.token_ids == [5, *range(100, 300)]


class OrderedSink(RecordingSink):
    """Notes the order of responses among sinks."""

    def __init__(self, order: list[OrderedSink], gate: threading.Event) -> None:
        super().__init__(gate)
        self._order = order

    def send(self, response: object) -> None:
        self._order.append(self)
        super().send(response)  # type: ignore[arg-type]


def test_streams_are_answered_in_turn(tmp_path: Path) -> None:
    harness = FrontendHarness(tmp_path, num_senders=1)
    order: list[OrderedSink] = []
    gate = threading.Event()
    gate.set()
    sinks = [OrderedSink(order, gate) for _ in range(5)]
    keys = [harness.submit(sink=sink, stream=True).key for sink in sinks]
    for key, sink in zip(keys, sinks, strict=True):
        harness.deliver_tokens({key: 5})
        sink.wait_chunks(1)
    gate.clear()
    harness.deliver_tokens({keys[0]: 6})  # its turn lasts until the gate opens
    for number in range(20):
        harness.deliver_tokens(dict.fromkeys(keys, 10 + number))
    gate.set()
    for sink in sinks:
        sink.wait_chunks(2)
    assert order[:10] == [*sinks, *sinks]
    assert all(len(sink.chunks) <= 3 for sink in sinks)
    for key in keys:
        harness.deliver(key, [], "length")
    harness.close()
