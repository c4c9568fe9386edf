from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tidewheel.request import Request

_SLACK = 64


class Event(NamedTuple):
    time: float  # seconds, monotonic
    number: int  # order of pushes, breaks ties
    request: Request


class EventHeap:
    """Timed events: deadlines and changes of class.

    Dead events stay until due or until they are the larger half. Removal is free, and size is O(unfinished requests).
    """

    def __init__(self, is_live: Callable[[Event], bool]) -> None:
        self._is_live = is_live
        self._heap: list[Event] = []
        self._num_pushed = 0

    @property
    def next_time(self) -> float:
        """Time of the first event, live or dead; else infinity."""
        return self._heap[0].time if self._heap else math.inf

    def push(self, time: float, request: Request, num_unfinished: int) -> None:
        """Add an event. `num_unfinished` requests may have one live event each."""
        if len(self._heap) >= 2 * num_unfinished + _SLACK:
            self._heap = [event for event in self._heap if self._is_live(event)]
            heapq.heapify(self._heap)
        self._num_pushed += 1
        heapq.heappush(self._heap, Event(time, self._num_pushed, request))

    def pop_due(self, now: float) -> Iterator[Event]:
        """Yield due live events, including events pushed meanwhile."""
        while self._heap and self._heap[0].time <= now:
            event = heapq.heappop(self._heap)
            if self._is_live(event):
                yield event
