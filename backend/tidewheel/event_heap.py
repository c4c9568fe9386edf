import heapq
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

_SLACK = 64


class TimedEvent(NamedTuple, Generic[T]):
    time: float  # monotonic seconds
    number: int  # order of pushes
    subject: T


class EventHeap(Generic[T]):
    """Heap of timed events. `is_live` is False for a cancelled event, which the heap drops later."""

    def __init__(self, is_live: Callable[[TimedEvent[T]], bool]) -> None:
        self._is_live = is_live
        self._heap: list[TimedEvent[T]] = []
        self._num_pushed = 0

    def push(self, time: float, subject: T, num_live: int) -> None:
        """`num_live`: upper bound on the live events already in the heap."""
        if len(self._heap) >= 2 * num_live + _SLACK:
            self._heap = [event for event in self._heap if self._is_live(event)]
            heapq.heapify(self._heap)
        self._num_pushed += 1
        heapq.heappush(self._heap, TimedEvent(time, self._num_pushed, subject))

    def pop_due(self, now: float) -> Iterator[TimedEvent[T]]:
        """Yield due live events, including events pushed meanwhile."""
        while self._heap and self._heap[0].time <= now:
            event = heapq.heappop(self._heap)
            if self._is_live(event):
                yield event
