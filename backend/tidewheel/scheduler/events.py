"""Events that time brings: deadlines, and changes of class."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tidewheel.request import Request

_SLACK = 64


class Event(NamedTuple):
    time: float  # seconds, monotonic
    number: int  # breaks ties, in the order of the pushes
    request: Request


class EventHeap:
    """Events in the order of their times.

    Dead events stay until their time comes, or until they are the larger half. So the heap is bounded by the
    unfinished requests, and no removal costs anything.
    """

    def __init__(self, is_live: Callable[[Event], bool]) -> None:
        self._is_live = is_live
        self._heap: list[Event] = []
        self._num_pushed = 0

    @property
    def next_time(self) -> float:
        """Time of the first event, live or dead; infinity if there is none."""
        return self._heap[0].time if self._heap else math.inf

    def push(self, time: float, request: Request, num_unfinished: int) -> None:
        """Add an event. At most `num_unfinished` requests may have a live event here, each at most one."""
        if len(self._heap) >= 2 * num_unfinished + _SLACK:
            self._heap = [event for event in self._heap if self._is_live(event)]
            heapq.heapify(self._heap)
        self._num_pushed += 1
        heapq.heappush(self._heap, Event(time, self._num_pushed, request))

    def pop_due(self, now: float) -> Iterator[Event]:
        """Yield live events whose time has come. More may be pushed meanwhile."""
        while self._heap and self._heap[0].time <= now:
            event = heapq.heappop(self._heap)
            if self._is_live(event):
                yield event
