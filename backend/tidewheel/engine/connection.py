from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from tidewheel.engine import messages
from tidewheel.engine.folder import Status, socket_address
from tidewheel.errors import Busy, TidewheelError, from_wire
from tidewheel_process.handle import ProcessHandle

log = logging.getLogger(__name__)

MAX_HELD = 4096
MAX_MESSAGES = 1024  # per `receive`
LAST_WORDS_MS = 100  # of a dead engine, still in ZeroMQ's thread


class _Add(NamedTuple):
    key: int
    payload: bytes
    num_sequences: int
    deadline: float


class _Cancel(NamedTuple):
    keys: list[int]
    sequences: list[tuple[int, int]]  # key and index


class Outbox:
    """Requests until their end: queued, held without an engine, or in flight.

    `put`, `put_cancel` and `wake` are thread-safe; one io thread calls the rest.
    """

    def __init__(self, *, hold_s: float, max_held: int = MAX_HELD) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._max_held = max_held
        self._hold_s = hold_s
        self._lock = threading.RLock()
        self._queue: deque[_Add | _Cancel] = deque()
        self._refusal: TidewheelError | None = None
        self._is_closed = False
        self._is_signalled = False  # `wake_fd` is to be read
        self._held: dict[int, _Add] = {}
        self._in_flight: dict[int, int] = {}  # unfinished sequences by key
        self._cancelled = _Cancel([], [])  # in flight, not yet sent

    def put(self, key: int, payload: bytes, num_sequences: int = 1) -> None:
        """Raise `Busy` if too many are held, or the error of `refuse`."""
        with self._lock:
            if self._refusal is not None:
                refusal = self._refusal  # each raising thread needs its own instance
                raise from_wire(refusal.tag, refusal.message, refusal.retry_after_ms)
            num_waiting = len(self._queue) + len(self._held)
            if num_waiting >= self._max_held:
                full = f"{num_waiting} of {self._max_held} requests wait for the engine"
                raise Busy(full, retry_after_ms=messages.RETRY_AFTER_MS)
            self._push(_Add(key, payload, num_sequences, time.monotonic() + self._hold_s))

    def put_cancel(self, keys: list[int], sequences: list[tuple[int, int]] | None = None) -> None:
        with self._lock:
            if self._refusal is None:
                self._push(_Cancel(keys, sequences or []))

    def _push(self, entry: _Add | _Cancel) -> None:
        if not self._queue:
            self.wake()
        self._queue.append(entry)

    def wake(self) -> None:
        with self._lock:
            if not self._is_closed:  # a closed descriptor's number may be reused
                self._is_signalled = True
                os.eventfd_write(self.wake_fd, 1)

    def take(self) -> list[int]:
        """Process the queue. Return keys cancelled unsent."""
        if not self._is_signalled:
            return []
        with self._lock:
            os.eventfd_read(self.wake_fd)
            self._is_signalled = False
            entries, self._queue = self._queue, deque()
        unsent: list[int] = []
        for entry in entries:
            if isinstance(entry, _Add):
                self._held[entry.key] = entry
                continue
            unsent += [key for key in entry.keys if self._held.pop(key, None) is not None]
            self._cancelled.keys.extend(key for key in entry.keys if key in self._in_flight)
            self._cancelled.sequences.extend(pair for pair in entry.sequences if pair[0] in self._in_flight)
        return unsent

    def flush(self, send: Callable[[bytes], bool]) -> None:
        for key, held in list(self._held.items()):
            if not send(held.payload):
                return
            del self._held[key]
            self._in_flight[key] = held.num_sequences
        if any(self._cancelled) and send(messages.encoder.encode(messages.Cancel(*self._cancelled))):
            self._cancelled = _Cancel([], [])

    def ended(self, deltas: Iterable[messages.Delta]) -> None:
        for delta in deltas:
            if not delta.finish_reason or delta.key not in self._in_flight:
                continue
            self._in_flight[delta.key] -= 1
            if delta.index == messages.WHOLE_REQUEST or not self._in_flight[delta.key]:
                del self._in_flight[delta.key]

    def lose_in_flight(self) -> list[int]:
        lost = list(self._in_flight)
        self._in_flight.clear()
        self._cancelled = _Cancel([], [])
        return lost

    def lose_expired(self) -> list[int]:
        now = time.monotonic()
        expired = []
        for key, held in self._held.items():
            if held.deadline > now:
                break
            expired.append(key)
        for key in expired:
            del self._held[key]
        return expired

    def refuse(self, error: TidewheelError) -> list[int]:
        """Make `put` raise the error. Return unfinished keys."""
        with self._lock:
            self._refusal = error
            self.wake()
        cancelled = self.take()
        lost = [*cancelled, *self._held, *self.lose_in_flight()]
        self._held.clear()
        return lost

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.wake_fd)


class Connection:
    """DEALER socket and process handle of one engine."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engine_dir: Path, status: Status) -> None:
        self._socket = context.socket(zmq.DEALER)  # first: it may fail
        self.process = ProcessHandle(status.pid, status.start_ticks)
        self._socket.set(zmq.SNDHWM, messages.QUEUE_LIMIT)
        self._socket.set(zmq.RCVHWM, messages.QUEUE_LIMIT)
        self._socket.set(zmq.LINGER, 200)
        self._socket.connect(socket_address(engine_dir))

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        if self.process.fileno is not None:
            poller.register(self.process.fileno, zmq.POLLIN)

    def send(self, message: messages.Message) -> bool:
        return self.send_encoded(messages.encoder.encode(message))

    def send_encoded(self, payload: bytes) -> bool:
        """Return False if the engine's queue is full."""
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_ms: int = 0) -> list[messages.FromEngine]:
        """Return messages, after at most `timeout_ms` for the first."""
        received: list[messages.FromEngine] = []
        if timeout_ms:
            self._socket.poll(timeout_ms)
        while len(received) < MAX_MESSAGES and int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            payload = self._socket.recv(zmq.NOBLOCK)
            try:
                received.append(messages.from_engine_decoder.decode(payload))
            except msgspec.MsgspecError:
                log.exception("ignored a malformed message of the engine")
        return received

    def last_words(self) -> list[messages.FromEngine]:
        received: list[messages.FromEngine] = []
        while more := self.receive(LAST_WORDS_MS):
            received += more
        return received

    def close(self) -> None:
        self.process.close()
        self._socket.close()
