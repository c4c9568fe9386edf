"""Calls of the server's user to an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import zmq

from tidewheel.engine.connection import Connection
from tidewheel.engine.folder import read_status
from tidewheel.engine.messages import CancelReply, CancelRequest, Drain, ListRequests, Message, RequestList, Stats
from tidewheel.stats import EngineStats

T = TypeVar("T", bound=Message)
ANSWER_S = 5.0


def drain(engine_dir: Path, timeout_s: float = ANSWER_S) -> EngineStats | None:
    """Return the draining engine's figures, or None on timeout."""
    answer = _ask(engine_dir, Drain(), Stats, timeout_s)
    return None if answer is None else answer.stats


def list_requests(engine_dir: Path, limit: int, timeout_s: float = ANSWER_S) -> RequestList | None:
    """Return the oldest requests, or None on timeout."""
    return _ask(engine_dir, ListRequests(limit), RequestList, timeout_s)


def cancel_request(engine_dir: Path, pid: int, number: int, timeout_s: float = ANSWER_S) -> bool | None:
    """Cancel a request of `list_requests`. Return whether it was there, or None on timeout."""
    answer = _ask(engine_dir, CancelRequest(pid, number), CancelReply, timeout_s)
    return None if answer is None else answer.was_there


def _ask(engine_dir: Path, message: Message, kind: type[T], timeout_s: float) -> T | None:
    status = read_status(engine_dir)
    if status is None or status.state != "ready" or not status.is_alive:
        return None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    connection = Connection(context, engine_dir, status)
    try:
        connection.send(message)
        answers = connection.receive(int(timeout_s * 1000))
        return next((answer for answer in answers if isinstance(answer, kind)), None)
    finally:
        connection.close()
        context.term()
