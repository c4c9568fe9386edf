"""Requests that wait for tokenisation.

They go by class, then by the earlier of deadline and arrival + `_AGEING_NS`. Each `_AGEING_NS` of waiting lifts a
request one class, so that none starves. Long prompts leave one thread to short ones.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

from tidewheel.errors import Busy
from tidewheel.frontend.live import LiveRequest

_Heap = list[tuple[int, int, LiveRequest]]  # due time, key (by arrival), request
_AGEING_NS = 10_000_000_000
_LONG_PROMPT_BYTES = 16 << 10  # some milliseconds of work
_MAX_REQUESTS = 4096
_MAX_PROMPTS = 64  # of maximum size
_RETRY_AFTER_MS = 250


class PromptQueue:
    """Thread-safe queue. A request counts from `put` to `done`."""

    def __init__(self, max_prompt_bytes: int, num_threads: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._max_bytes = _MAX_PROMPTS * max_prompt_bytes
        self._max_long = num_threads - 1  # in work at once
        self._clock = clock
        self._heaps: dict[tuple[bool, int], _Heap] = {}  # by (is long, class)
        self._num_requests = 0
        self._num_bytes = 0
        self._num_long = 0  # in work
        self._changed = threading.Condition()
        self._is_closed = False

    def refusal(self, num_bytes: int) -> Busy | None:
        """Return the error for a prompt of this size; None if it may wait."""
        full = ""
        if self._num_requests >= _MAX_REQUESTS:
            full = f"{self._num_requests} of {_MAX_REQUESTS} requests"
        elif self._num_bytes + num_bytes > self._max_bytes:
            full = f"{self._num_bytes} of {self._max_bytes} prompt bytes"
        return Busy(f"too much waits to be tokenised: {full}", retry_after_ms=_RETRY_AFTER_MS) if full else None

    def put(self, request: LiveRequest) -> None:
        urgency, latest_ns = request.urgency, request.arrival_ns + _AGEING_NS
        due_ns = min(urgency.deadline_ns or urgency.soft_deadline_ns or latest_ns, latest_ns)
        with self._changed:
            heap = self._heaps.setdefault((_is_long(request), urgency.priority), [])
            heapq.heappush(heap, (due_ns, request.key, request))
            self._num_requests += 1
            self._num_bytes += request.asked.prompt_bytes
            self._changed.notify()

    def take(self) -> LiveRequest | None:
        """Wait for the next request; None once closed."""
        with self._changed:
            while not self._is_closed:
                heap = self._next_heap(self._clock())
                if heap is not None:
                    *_, request = heapq.heappop(heap)
                    self._num_long += _is_long(request)
                    return request
                self._changed.wait()
        return None

    def done(self, request: LiveRequest) -> None:
        with self._changed:
            self._num_requests -= 1
            self._num_bytes -= request.asked.prompt_bytes
            self._num_long -= _is_long(request)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _next_heap(self, now_ns: int) -> _Heap | None:
        """Return the heap with the most urgent permitted request."""
        ranked = [
            (priority - (now_ns - heap[0][-1].arrival_ns) // _AGEING_NS, heap[0], heap)
            for (is_long, priority), heap in self._heaps.items()
            if heap and not (is_long and self._num_long >= self._max_long)
        ]
        return min(ranked)[-1] if ranked else None


def _is_long(request: LiveRequest) -> bool:
    return request.asked.prompt_bytes > _LONG_PROMPT_BYTES
