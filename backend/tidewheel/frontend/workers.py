"""Threads that work through a queue."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Workers(Generic[T]):
    """Threads that call `work` with what `take` returns, until that is None. What `work` raises is logged."""

    def __init__(self, name: str, count: int, take: Callable[[], T | None], work: Callable[[T], None]) -> None:
        self._take = take
        self._work = work
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Return whether all threads have ended in time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (item := self._take()) is not None:
            try:
                self._work(item)
            except Exception:
                logger.exception("a thread's work failed")
