"""Requests between `add` and their end: a key is in one place, and leaves it once."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewheel.engine import connection
from tidewheel.engine.connection import Outbox
from tidewheel.engine.messages import WHOLE_REQUEST, BatchDone, Cancel, Delta, ErrorInfo, to_engine_decoder
from tidewheel.errors import Busy, Draining


@pytest.fixture
def outbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outbox]:
    monkeypatch.setattr(connection, "MAX_HELD", 4)
    box = Outbox(hold_s=10.0)
    yield box
    box.close()


class Wire:
    """Takes `room` messages."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.sent: list[bytes] = []

    def send(self, payload: bytes) -> bool:
        if len(self.sent) >= self.room:
            return False
        self.sent.append(payload)
        return True


def is_awake(outbox: Outbox) -> bool:
    return bool(select.select([outbox.wake_fd], [], [], 0)[0])


def test_a_put_wakes_once(outbox: Outbox) -> None:
    assert not is_awake(outbox)
    outbox.put(1, b"one")
    outbox.put(2, b"two")
    assert is_awake(outbox)
    outbox.clear_wake()
    assert not is_awake(outbox)
    wire = Wire()
    outbox.flush(wire.send)
    assert wire.sent == [b"one", b"two"]
    outbox.flush(wire.send)
    assert len(wire.sent) == 2


def test_what_is_not_taken_stays(outbox: Outbox) -> None:
    for key in range(3):
        outbox.put(key, bytes([key]))
    outbox.clear_wake()
    outbox.flush(Wire(room=1).send)
    assert outbox.lose_in_flight() == [0]
    wire = Wire()
    outbox.flush(wire.send)
    assert wire.sent == [b"\1", b"\2"]


def test_cancelled_before_it_was_sent(outbox: Outbox) -> None:
    outbox.put(1, b"one")
    for key in (1, 7):
        outbox.put_cancel(key)
    outbox.clear_wake()
    wire = Wire()
    outbox.flush(wire.send)
    assert wire.sent == []


def test_cancelled_in_flight_is_told_to_the_engine(outbox: Outbox) -> None:
    outbox.put(1, b"one")
    outbox.put(2, b"two")
    outbox.clear_wake()
    outbox.flush(Wire().send)
    outbox.ended([Delta(2, [], "stop")])
    for key in (1, 2):
        outbox.put_cancel(key)
    outbox.clear_wake()
    outbox.flush(Wire(room=0).send)
    wire = Wire()
    outbox.flush(wire.send)
    assert [to_engine_decoder.decode(payload) for payload in wire.sent] == [Cancel([(1, WHOLE_REQUEST)])]


def test_a_request_is_in_flight_until_its_last_sequence_has_ended(outbox: Outbox) -> None:
    for key in (1, 2, 3):
        outbox.put(key, b"", 2)
    outbox.clear_wake()
    outbox.flush(Wire().send)
    outbox.ended([Delta(1, [], "stop", index=1), Delta(2, [5], index=0), Delta(3, [], "error", index=WHOLE_REQUEST)])
    outbox.ended([Delta(1, [], "length", index=0), Delta(2, [], "stop", index=0), Delta(9, [], "stop")])
    assert outbox.lose_in_flight() == [2]


def test_one_sequence_is_cancelled(outbox: Outbox) -> None:
    outbox.put(1, b"one", 2)
    outbox.clear_wake()
    outbox.flush(Wire().send)
    outbox.put_cancel(1, 1)
    outbox.put_cancel(7, 0)
    outbox.clear_wake()
    wire = Wire()
    outbox.flush(wire.send)
    assert [to_engine_decoder.decode(payload) for payload in wire.sent] == [Cancel([(1, 1)])]


def test_a_key_that_was_refused_can_be_sent_again(outbox: Outbox) -> None:
    wire = Wire()
    for _ in range(2):
        outbox.put(1, b"one")
        outbox.clear_wake()
        outbox.flush(wire.send)
        outbox.ended([Delta(1, [], "error", index=WHOLE_REQUEST)])
    assert wire.sent == [b"one", b"one"]
    assert outbox.lose_in_flight() == []


def test_waiting_is_bounded(outbox: Outbox) -> None:
    for key in range(2):
        outbox.put(key, b"")
    outbox.clear_wake()
    for key in range(2, 4):
        outbox.put(key, b"")
    with pytest.raises(Busy, match="4 requests wait") as error:
        outbox.put(4, b"")
    assert error.value.retry_after_ms == 1000


def test_holding_ends(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    outbox.put(1, b"")
    outbox.clear_wake()
    now = 105.0
    outbox.put(2, b"")
    outbox.clear_wake()
    assert outbox.lose_expired() == []
    now = 110.5
    assert outbox.lose_expired() == [1]
    assert outbox.lose_expired() == []
    now = 115.5
    assert outbox.lose_expired() == [2]


def test_refusing_ends_every_key_wherever_it_is(outbox: Outbox) -> None:
    outbox.put(1, b"in flight")
    outbox.clear_wake()
    outbox.flush(Wire().send)
    outbox.put(2, b"held")
    outbox.clear_wake()
    outbox.put(3, b"queued")
    assert sorted(outbox.refuse(Draining("bye"))) == [1, 2, 3]
    assert outbox.refuse(Draining("again")) == []
    with pytest.raises(Draining, match="again") as first:
        outbox.put(4, b"")
    with pytest.raises(Draining) as second:
        outbox.put(4, b"")
    assert first.value is not second.value
    outbox.put_cancel(1)
    outbox.clear_wake()


def test_waking_after_the_end_touches_no_descriptor() -> None:
    outbox = Outbox(hold_s=10.0)
    outbox.refuse(Draining("bye"))
    outbox.close()
    with Path("/dev/null").open("rb", buffering=0) as successor:  # takes the number over
        assert successor.fileno() == outbox.wake_fd
        outbox.wake()


def test_reports_of_what_ran_here_go_to_the_engine_that_asked(outbox: Outbox) -> None:
    for key in (1, 2, 3):
        outbox.put(key, b"")
    error = ErrorInfo("TW-MODEL", "no")
    outbox.put_done(1, None)  # not sent yet
    outbox.flush(Wire().send)
    outbox.put_done(1, None)
    outbox.put_done(2, error)
    outbox.flush(Wire(room=0).send)
    wire = Wire()
    outbox.flush(wire.send)
    (report,) = map(to_engine_decoder.decode, wire.sent)
    assert report == BatchDone([(1, None), (2, error)])
    outbox.put_done(3, None)
    outbox.lose_in_flight()
    outbox.put_done(2, None)
    outbox.flush(Wire(room=0).send)
    outbox.put(4, b"")
    wire = Wire()
    outbox.flush(wire.send)
    assert wire.sent == [b""]
