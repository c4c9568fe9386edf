"""Orders of the server's user to an engine, through its socket: drain, list requests, cancel one."""

from __future__ import annotations

from pathlib import Path

from tidewheel.engine.connection import ask
from tidewheel.engine.messages import CancelRequest, CancelTaken, Drain, ListRequests, Requests, Stats
from tidewheel.stats import EngineStats

ANSWER_S = 5.0


def drain(engine_dir: Path, timeout_s: float = ANSWER_S) -> EngineStats | None:
    """Make the engine refuse new requests. Return its figures, or None without an answer in time."""
    answer = ask(engine_dir, Drain(), Stats, timeout_s)
    return None if answer is None else answer.stats


def list_requests(engine_dir: Path, limit: int, timeout_s: float = ANSWER_S) -> Requests | None:
    """Return the oldest requests of all front ends, or None without an answer in time."""
    return ask(engine_dir, ListRequests(limit), Requests, timeout_s)


def cancel_request(engine_dir: Path, pid: int, number: int, timeout_s: float = ANSWER_S) -> bool | None:
    """Cancel a request as `list_requests` names it. Return whether it was there, or None without an answer."""
    answer = ask(engine_dir, CancelRequest(pid, number), CancelTaken, timeout_s)
    return None if answer is None else answer.was_there
