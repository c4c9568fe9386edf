"""What this front end knows of the room in the engine's waiting set, to refuse at once what the engine would refuse
only after the step that it is in."""

from __future__ import annotations

import threading

from tidewheel.engine.messages import AddRequest, Room
from tidewheel.errors import WaitingSetFull


class Vacancy:
    """Counts what the engine said last and what was sent since. Any thread may call.

    It never refuses what the engine would take by its last word; the engine still decides about everything else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room: Room | None = None
        self._sent: dict[int, AddRequest] = {}  # by key, unknown to that word
        self._num_requests = 0
        self._num_tokens = 0

    def claim(self, message: AddRequest) -> None:
        """The request is about to be sent. Raises `WaitingSetFull`, and counts nothing, if that would be in vain."""
        with self._lock:
            if self._room is not None and message.priority >= self._lowest_class(self._room):
                self._check(self._room, message.n, _num_tokens(message))
            self._sent[message.key] = message
            self._num_requests += message.n
            self._num_tokens += _num_tokens(message)

    def hear(self, room: Room) -> None:
        with self._lock:
            self._room = room
            for key in room.received:
                self._forget(key)

    def forget(self, key: int) -> None:
        """The request is over, or was not sent after all."""
        with self._lock:
            self._forget(key)

    def reset(self) -> None:
        """The engine that said so is gone, and what was sent to it will not be heard of."""
        with self._lock:
            self._room = None
            self._sent.clear()
            self._num_requests = self._num_tokens = 0

    def _lowest_class(self, room: Room) -> int:
        """Of all that may wait by now: whoever is of a better class may take a place."""
        return max([room.lowest_class, *(message.priority for message in self._sent.values())])

    def _check(self, room: Room, num_sequences: int, num_tokens: int) -> None:
        num_waiting = room.num_requests + self._num_requests
        num_waiting_tokens = room.num_tokens + self._num_tokens
        if num_waiting + num_sequences > room.max_requests:
            full = f"{num_waiting} of {room.max_requests} requests"
        elif num_waiting_tokens + num_tokens > room.max_tokens:
            full = f"{num_waiting_tokens} of {room.max_tokens} tokens, and this prompt has {num_tokens}"
        else:
            return
        raise WaitingSetFull(f"waiting set is full: {full}", retry_after_ms=room.retry_after_ms)

    def _forget(self, key: int) -> None:
        message = self._sent.pop(key, None)
        if message is not None:
            self._num_requests -= message.n
            self._num_tokens -= _num_tokens(message)


def _num_tokens(message: AddRequest) -> int:
    return message.n * (len(message.prompt) // 4)
