"""Calls of the server's user to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard, TypeVar

import zmq

from tidewheel.engine.connection import Connection
from tidewheel.engine.folder import Status, read_status
from tidewheel.engine.messages import CancelReply, CancelRequest, Drain, ListRequests, Message, RequestList, Stats
from tidewheel.stats import EngineStats

T = TypeVar("T", bound=Message)
ANSWER_S = 5.0


def drain(engine_dir: Path, timeout_s: float = ANSWER_S) -> EngineStats | None:
    """Return the draining engine's figures, or None on timeout."""
    answer = _ask(engine_dir, Drain(), Stats, timeout_s)
    return None if answer is None else answer.stats


def drain_all(engine_dirs: Sequence[Path], timeout_s: float) -> int | None:
    """Drain the serving engines. Return their unfinished requests, 1 for each timeout; None without an engine."""
    serving = [folder for folder in engine_dirs if _is_ready(read_status(folder))]
    stats = [drain(folder, timeout_s) for folder in serving]
    return sum(1 if one is None else one.num_running + one.num_waiting for one in stats) if serving else None


def list_requests(engine_dir: Path, limit: int, timeout_s: float = ANSWER_S) -> RequestList | None:
    """Return the oldest requests, or None on timeout."""
    return _ask(engine_dir, ListRequests(limit), RequestList, timeout_s)


def cancel_request(engine_dir: Path, pid: int, number: int, timeout_s: float = ANSWER_S) -> bool | None:
    """Cancel a request of `list_requests`. Return whether it was there, or None on timeout."""
    answer = _ask(engine_dir, CancelRequest(pid, number), CancelReply, timeout_s)
    return None if answer is None else answer.was_there


def _ask(engine_dir: Path, message: Message, kind: type[T], timeout_s: float) -> T | None:
    status = read_status(engine_dir)
    if not _is_ready(status):
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


def _is_ready(status: Status | None) -> TypeGuard[Status]:
    return status is not None and status.state == "ready" and status.is_alive
