from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_EVENTS = 8192
FLUSH_S = 0.2
_WARN_S = 10.0

logger = logging.getLogger(__name__)


class EventQueue(Generic[T]):
    """Bounded queue before something slow, such as a disk or a network.

    `put` never waits for the consumer. A thread passes on what has come, `interval_s` apart and at the end. What a
    full queue or a failing consumer loses is counted, and a line of the log says so.
    """

    def __init__(
        self,
        name: str,
        consume: Callable[[list[T]], None],
        *,
        max_events: int = MAX_EVENTS,
        interval_s: float = FLUSH_S,
    ) -> None:
        self.num_lost = 0
        self._name = name
        self._consume = consume
        self._max_events = max_events
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._events: list[T] = []
        self._num_told = 0
        self._next_warning = 0.0
        self._problem = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, event: T) -> None:
        with self._lock:
            if len(self._events) < self._max_events:
                self._events.append(event)
            else:
                self.num_lost += 1
                self._problem = f"more than {self._max_events} wait"

    def close(self, timeout_s: float = 5.0) -> None:
        """Pass on the rest. A consumer that hangs is left behind."""
        self._stopped.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(self._interval_s)
            self._flush()
            self._warn(is_due=is_last)

    def _flush(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        if not events:
            return
        try:
            self._consume(events)
        except Exception as error:
            with self._lock:
                self.num_lost += len(events)
                self._problem = str(error)

    def _warn(self, *, is_due: bool) -> None:
        now = time.monotonic()
        if self.num_lost > self._num_told and (is_due or now >= self._next_warning):
            logger.warning("%s: %d were lost (%s)", self._name, self.num_lost - self._num_told, self._problem)
            self._num_told, self._next_warning = self.num_lost, now + _WARN_S
