"""Waits of a queue's tests, and calls whose Redis is killed again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from support.triton.serving import wait_for
from tidewheel_client import ServerUnavailable
from tidewheel_queue import Queue


def enqueue_at_last(queue: Queue, jobs: Sequence[dict[str, object]], limit_s: float) -> None:
    """Try until they are in: a kill may hit any try."""
    end = time.monotonic() + limit_s
    while True:
        try:
            queue.enqueue_many(jobs)
            return
        except ServerUnavailable:
            assert time.monotonic() < end


def wait_until_all_ended(queue: Queue, limit_s: float) -> None:
    wait_for(lambda: num_left(queue) == 0, limit_s, "the last result")


def num_left(queue: Queue) -> int:
    """Return how many jobs wait or run; -1 if Redis does not answer."""
    try:
        counts = queue.counts()
    except ServerUnavailable:
        return -1
    return sum(counts.waiting) + sum(counts.running)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition is true. Fail after a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.01)
