"""Holds the server's own queue back while as many requests as may wait do wait at the engine.

What this front end has sent and the engine has not started is counted here, so the gate closes without a question
to the engine. Front ends that share an engine do not know of each other: together they may send more than it lets
wait. What it then refuses is kept here, in order, and offered again when a request of ours has started, and a few
times a second; nothing that came through the gate is refused for want of room.
"""

from __future__ import annotations

import itertools
import threading


class Gate:
    """Any thread may call. `max_requests` and `max_tokens` are the engine's bounds of its waiting set."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._changed = threading.Condition()
        self._unstarted: dict[int, tuple[int, int]] = {}  # sequences and prompt tokens, by key
        self._num_requests = 0
        self._num_tokens = 0
        self._refused: dict[int, None] = {}  # keys to be offered again, first refused first
        self._late: set[int] = set()  # refused once, and not started yet: nobody else comes in meanwhile
        self._is_released = False

    def enter(self, key: int) -> None:
        """A request was let in; what it weighs is not known yet."""
        with self._changed:
            self._set(key, 1, 0)

    def weigh(self, key: int, num_requests: int, num_tokens: int) -> None:
        """It is about to be sent; nothing if it has left meanwhile."""
        with self._changed:
            if key in self._unstarted:
                self._set(key, num_requests, num_tokens)

    def refuse(self, key: int) -> None:
        """The engine had no room for it."""
        with self._changed:
            if key in self._unstarted:
                self._refused[key] = None
                self._late.add(key)

    def leave(self, key: int) -> list[int]:
        """It has started, or is over; the refused ones that can take its place."""
        with self._changed:
            if key not in self._unstarted:
                return []
            self._set(key, 0, 0)
            del self._unstarted[key]
            self._refused.pop(key, None)
            self._late.discard(key)
            self._changed.notify_all()
            return self._take_refused(1)

    def offer(self, num_waiting: int) -> list[int]:
        """The refused ones that the engine has room for by its own account, at least one."""
        with self._changed:
            return self._take_refused(max(1, self._max_requests - num_waiting))

    def wait(self) -> None:
        """Until one more may be let in."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open)

    def release(self) -> None:
        """Nobody is held back any more."""
        with self._changed:
            self._is_released = True
            self._changed.notify_all()

    @property
    def _is_open(self) -> bool:
        has_room = self._num_requests < self._max_requests and self._num_tokens < self._max_tokens
        return self._is_released or (has_room and not self._late)

    def _take_refused(self, count: int) -> list[int]:
        keys = list(itertools.islice(self._refused, count))
        for key in keys:
            del self._refused[key]
        return keys

    def _set(self, key: int, num_requests: int, num_tokens: int) -> None:
        before = self._unstarted.get(key, (0, 0))
        self._unstarted[key] = (num_requests, num_tokens)
        self._num_requests += num_requests - before[0]
        self._num_tokens += num_tokens - before[1]
