import contextlib
import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import zmq

from tidewheel.engine import messages
from tidewheel.engine.folder import Status, read_serving, socket_address
from tidewheel.engine.heartbeat import HangWatch
from tidewheel.errors import Busy, TidewheelError
from tidewheel_process.child import ProcessHandle

log = logging.getLogger(__name__)

MAX_HELD = 4096
MAX_MESSAGES = 1024  # per `receive`
LAST_WORDS_MS = 100  # of a dead engine, still in ZeroMQ's thread
ANSWER_S = 5.0

T = TypeVar("T", bound=messages.Message)


class _HeldRequest(NamedTuple):
    payload: bytes
    num_sequences: int
    deadline: float


class Outbox:
    """Requests until their end: held until an engine takes them, then in flight.

    `put`, `put_cancel`, `put_done` and `wake` are thread-safe; one io thread calls the rest.
    """

    def __init__(self, *, hold_s: float) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._hold_s = hold_s
        self._lock = threading.RLock()
        self._refusal: TidewheelError | None = None
        self._is_closed = False
        self._is_signalled = False  # `wake_fd` is to be read
        self._held: dict[int, _HeldRequest] = {}
        self._in_flight: dict[int, int] = {}  # unfinished sequences by key
        self._cancelled: list[tuple[int, int]] = []  # (key, index) in flight, not yet sent
        self._done: list[tuple[int, messages.ErrorInfo | None]] = []  # likewise

    def put(self, key: int, payload: bytes, num_sequences: int = 1) -> None:
        """Queue a request. Raise `Busy` if too many are held, or the error given to `refuse`."""
        with self._lock:
            if self._refusal is not None:
                raise copy.copy(self._refusal)  # each raising thread needs its own instance
            if len(self._held) >= MAX_HELD:
                full = f"{len(self._held)} of {MAX_HELD} requests wait for the engine"
                raise Busy(full, retry_after_ms=messages.RETRY_AFTER_MS)
            self._held[key] = _HeldRequest(payload, num_sequences, time.monotonic() + self._hold_s)
            self.wake()

    def put_cancel(self, key: int, index: int = messages.WHOLE_REQUEST) -> None:
        """Drop a held request, or queue its cancel."""
        with self._lock:
            if index == messages.WHOLE_REQUEST:
                self._held.pop(key, None)
            if key in self._in_flight:
                self._cancelled.append((key, index))
                self.wake()

    def put_done(self, key: int, error: messages.ErrorInfo | None) -> None:
        """Queue the report of a request that was run here."""
        with self._lock:
            if key in self._in_flight:
                self._done.append((key, error))
                self.wake()

    def wake(self) -> None:
        with self._lock:
            if not self._is_closed and not self._is_signalled:  # a closed descriptor's number may be reused
                self._is_signalled = True
                os.eventfd_write(self.wake_fd, 1)

    def clear_wake(self) -> None:
        if self._is_signalled:
            with self._lock:
                os.eventfd_read(self.wake_fd)
                self._is_signalled = False

    def flush(self, send: Callable[[bytes], bool]) -> None:
        with self._lock:
            keys = list(self._held)
        for key in keys:
            with self._lock:  # each send, so that `put` waits for no more
                if (held := self._held.get(key)) is None:
                    continue
                if not send(held.payload):
                    return
                del self._held[key]
                self._in_flight[key] = held.num_sequences
        with self._lock:
            if self._cancelled and send(messages.encoder.encode(messages.Cancel(self._cancelled))):
                self._cancelled = []
            if self._done and send(messages.encoder.encode(messages.BatchDone(self._done))):
                self._done = []

    def ended(self, deltas: Iterable[messages.Delta]) -> None:
        for delta in deltas:
            if not delta.finish_reason or delta.key not in self._in_flight:
                continue
            self._in_flight[delta.key] -= 1
            if delta.index == messages.WHOLE_REQUEST or not self._in_flight[delta.key]:
                del self._in_flight[delta.key]

    def lose_in_flight(self) -> list[int]:
        with self._lock:
            lost = list(self._in_flight)
            self._in_flight.clear()
            self._cancelled, self._done = [], []
            return lost

    def lose_expired(self) -> list[int]:
        now = time.monotonic()
        with self._lock:
            expired = list(takewhile(lambda key: self._held[key].deadline <= now, self._held))
            for key in expired:
                del self._held[key]
            return expired

    def refuse(self, error: TidewheelError) -> list[int]:
        """Make later `put` raise the error. Return the keys of all unfinished requests."""
        with self._lock:
            self._refusal = error
            lost = [*self._held, *self.lose_in_flight()]
            self._held.clear()
            return lost

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.wake_fd)


class Connection:
    """DEALER socket and process of one engine, and what is known of it while it is connected."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engine_dir: Path, status: Status) -> None:
        self._socket = context.socket(zmq.DEALER)  # first: it may fail
        self.process = ProcessHandle(status.pid, status.start_ticks)
        self._socket.set_hwm(messages.QUEUE_LIMIT)
        self._socket.set(zmq.LINGER, 200)
        self._socket.connect(socket_address(engine_dir))
        self.hang = HangWatch(engine_dir)
        self.is_ready = self.is_draining = False

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        if self.process.fileno is not None:
            poller.register(self.process.fileno, zmq.POLLIN)

    def send(self, message: messages.Message) -> bool:
        return self.send_encoded(messages.encoder.encode(message))

    def send_encoded(self, payload: bytes) -> bool:
        """Send a message; return False if the engine's queue is full."""
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_ms: int = 0) -> list[messages.FromEngine]:
        """Return received messages; wait at most `timeout_ms` for the first."""
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

    def close(self) -> None:
        self.process.close()
        self._socket.close()


def drain_all(engine_dirs: Sequence[Path], timeout_s: float) -> int | None:
    """Drain the serving engines. Return their unfinished requests, 1 for each silent engine; None if none serves."""
    serving = [folder for folder in engine_dirs if read_serving(folder)]
    answers = [ask(folder, messages.Drain(), messages.Stats, timeout_s) for folder in serving]
    left = (1 if answer is None else answer.stats.num_running + answer.stats.num_waiting for answer in answers)
    return sum(left) if serving else None


def ask(engine_dir: Path, message: messages.Message, kind: type[T], timeout_s: float = ANSWER_S) -> T | None:
    """Send a message to an engine. Return its answer of type `kind`; None if it does not serve or answer."""
    status = read_serving(engine_dir)
    if status is None:
        return None
    with (
        zmq.Context(io_threads=1) as context,
        contextlib.closing(Connection(context, engine_dir, status)) as connection,
    ):
        connection.send(message)
        answers = connection.receive(int(timeout_s * 1000))
        return next((answer for answer in answers if isinstance(answer, kind)), None)
