import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from tidewheel.frontend.live_request import LiveRequest, TokenColumns
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.processor_use import ProcessorMeter, ProcessorUse

logger = logging.getLogger(__name__)

ASKING_SHARE = 0.2  # of a thread's time: to ask Triton about a client takes some 100 µs
SHORT_ASKING_SHARE = 0.02  # for requests of one step

# Of the available processors, for turns; the rest of a response costs at least as much again.
SHARE = 0.35
MAX_STRETCH = 12.5  # of the longest interval, while processors are short
_LOAD = 0.7  # of the senders' time, for all streams in turn
_USE_SMOOTHING, _TURN_SMOOTHING = 0.5, 1 / 32
_LOOKS = 4  # in an interval
_LOOK_S = 0.02

T = TypeVar("T")
_End = Callable[[LiveRequest], None]


class Workers(Generic[T]):
    """Threads that call `work` with each result of `take`, until `take` returns None."""

    def __init__(self, name: str, count: int, take: Callable[[], T | None], work: Callable[[T], None]) -> None:
        self._take = take
        self._work = work
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (item := self._take()) is not None:
            try:
                self._work(item)
            except BaseException:  # library panics, too
                logger.exception("a front-end thread failed at one request")
            del item  # with its prompt, before the wait for another


@dataclass(eq=False)
class Watcher:
    """Thread that calls `expire` at deadlines and `cancel` when a client is gone, every `interval_s`."""

    live: Mapping[int, LiveRequest]
    cancel: _End
    expire: _End
    _: KW_ONLY
    interval_s: float
    share: float = ASKING_SHARE

    def __post_init__(self) -> None:
        self._sweep: Iterator[LiveRequest] = iter(())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(1.0)

    def expire_due(self) -> None:
        now_ns = time.monotonic_ns()
        for request in list(self.live.values()):
            if 0 < request.expires_ns <= now_ns:
                request.expires_ns = 0
                self.expire(request)

    def poll(self, budget_s: float) -> None:
        """Ask Triton which clients have disconnected, for `budget_s` seconds."""
        deadline = time.monotonic() + budget_s
        for request in self._sweep:
            self._ask(request)
            if time.monotonic() >= deadline:
                return
        self._sweep = iter(list(self.live.values()))

    def _ask(self, request: LiveRequest) -> None:
        try:
            is_cancelled = request.sink.is_cancelled()
        except Exception:
            logger.exception("could not ask whether a client is still there: its request is cancelled")
            is_cancelled = True
        if is_cancelled:
            self.cancel(request)

    def _run(self) -> None:
        while not self._stopped.wait(self.interval_s):
            try:
                self.expire_due()
                self.poll(self.share * self.interval_s)
            except Exception:
                logger.exception("a round of deadlines and cancellations failed")


class ResponseInterval:
    """Interval between a stream's responses: 0 while senders keep up, at most `longest_s`.

    It is longer to keep senders within a budget of processor time: beside a busy process, fewer and larger responses
    leave the engine its time.
    """

    def __init__(self, longest_s: float, num_senders: int, num_processors: int) -> None:
        self._longest_s, self._num_senders, self._num_processors = longest_s, num_senders, num_processors
        self._available = float(num_processors)
        self._turn_s = self._turn_processor_s = 0.0  # smoothed

    def observe(self, use: ProcessorUse) -> None:
        """Update the available processors: used by this server or idle, at least half: others take idle ones."""
        available = min(max(use.used + use.idle, 0.5 * self._num_processors), self._num_processors)
        self._available += (available - self._available) * _USE_SMOOTHING

    def add_turn(self, seconds: float, processor_s: float) -> None:
        self._turn_s += (seconds - self._turn_s) * _TURN_SMOOTHING
        self._turn_processor_s += (processor_s - self._turn_processor_s) * _TURN_SMOOTHING

    def seconds(self, num_streams: int) -> float:
        keeps_up_s = num_streams * self._turn_s / self._num_senders / _LOAD
        budgeted_s = num_streams * self._turn_processor_s / (SHARE * self._available)
        return max(min(self._longest_s, keeps_up_s), min(MAX_STRETCH * self._longest_s, budgeted_s))


@dataclass(eq=False)
class ResponseSenders:
    """Threads that send responses in turns (`LiveRequest`).

    First tokens and ends go first, then streams whose last turn is a `ResponseInterval` ago.
    """

    settings: FrontendSettings
    live: Mapping[int, LiveRequest]
    columns: TokenColumns
    answer: Callable[[LiveRequest, int], None]  # takes a turn, which begins at a monotonic time (ns)
    engine_pid: int

    def __post_init__(self) -> None:
        longest_s, num_senders = 1e-3 * self.settings.stream_interval_ms, self.settings.num_sender_threads
        self._interval = ResponseInterval(longest_s, num_senders, len(os.sched_getaffinity(0)))
        self._meter = ProcessorMeter(os.getppid(), self.engine_pid)  # the parent is tritonserver
        self._changed = threading.Condition()
        self._has_timekeeper = False  # among the threads that wait
        self._look_ns = 0  # next look: many due streams at once cost less
        self._urgent: deque[LiveRequest] = deque()
        self._due: deque[int] = deque()
        self._is_closed = False
        self._senders = Workers("sender", num_senders, self._take, self._turn)

    def put(self, request: LiveRequest) -> None:
        """Queue the request before waiting streams."""
        with self._changed:
            self._urgent.append(request)
            self._changed.notify()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Return whether each thread has finished its turn within `timeout_s`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        return self._senders.join(timeout_s)

    def _take(self) -> LiveRequest | None:
        with self._changed:
            while (request := self._next()) is None:
                if self._is_closed:
                    return None
                self._wait()
            if self._urgent or self._due or not (self._has_timekeeper or self.columns.next_taken_ns() is None):
                self._changed.notify()
            return request

    def _wait(self) -> None:
        if self._has_timekeeper:
            self._changed.wait()
            return
        self._has_timekeeper = True
        self._changed.wait(self._seconds_to_wait())
        self._has_timekeeper = False

    def _next(self) -> LiveRequest | None:
        if self._urgent:
            return self._urgent.popleft()
        if not self._due and (now_ns := time.monotonic_ns()) >= self._look_ns:
            interval_ns = self._interval_ns()
            self._look_ns = now_ns + interval_ns // _LOOKS
            self._due.extend(self.columns.due(now_ns - interval_ns))
        while self._due:
            request = self.live.get(self._due.popleft())
            if request is not None and request.claim_turn():
                return request
        return None

    def _interval_ns(self) -> int:
        if (use := self._meter.read()) is not None:
            self._interval.observe(use)
        return int(1e9 * self._interval.seconds(self.columns.num_awaited()))

    def _seconds_to_wait(self) -> float | None:
        taken_ns = self.columns.next_taken_ns()
        if taken_ns is None:
            return _LOOK_S if self.live else None  # a held-up thread may leave tokens
        return max(taken_ns + self._interval_ns(), self._look_ns) * 1e-9 - time.monotonic()

    def _turn(self, request: LiveRequest) -> None:
        begin_ns, processor_s = time.monotonic_ns(), time.thread_time()
        self.answer(request, begin_ns)
        processor_s = time.thread_time() - processor_s
        if request.end_turn():
            self.put(request)
        elif request.wants_chunks:
            self.columns.await_tokens(request.key, has_output=request.has_deltas)
        self._interval.add_turn(1e-9 * (time.monotonic_ns() - begin_ns), processor_s)
