"""A few threads that send responses, so that neither the engine's listener nor Triton's event path waits for one.

A request waits in one queue for its turn, and has at most one turn at a time: its responses keep their order,
whichever thread sends them. What comes in while it waits goes out in one response: the further the senders are
behind, the more each response carries. A sink that blocks holds up one thread and no other request; with as many
blocked sinks as threads, all wait as long as Triton blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SenderPool(Generic[T]):
    """Runs `turn` for everything that is put in, first come first served. `turn` is expected not to raise."""

    def __init__(self, num_threads: int, turn: Callable[[T], None]) -> None:
        self._turn = turn
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"sender-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, item: T) -> None:
        self._queue.put(item)

    def close(self, timeout_s: float) -> bool:
        """Ends the threads behind the turns that are queued. False: a turn has not ended in time."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._turn(item)
            except Exception:
                logger.exception("a sender's turn failed")
