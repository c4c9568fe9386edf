"""A replica that is removed refuses new requests, and waits for the running ones."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tidewheel.cluster import serve_app
from tidewheel.cluster.serve_app import ServerChild
from tidewheel.engine import connection
from tidewheel.server.endpoints import Endpoints

ONE, OTHER, DEAD = Path("one"), Path("other"), Path("dead")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ServerChild:
    """A server with three engines, one of which is dead."""
    server = object.__new__(ServerChild)
    server._endpoints = Endpoints(metrics=1234)
    monkeypatch.setattr(serve_app, "_DRAIN_LOOK_S", 0.0)
    monkeypatch.setattr(serve_app, "current_engines_of", {1234: [ONE, OTHER, DEAD]}.__getitem__)
    monkeypatch.setattr(connection, "read_serving", lambda engine: engine != DEAD)
    return server


def unfinished(**counts: int) -> SimpleNamespace:
    return SimpleNamespace(stats=SimpleNamespace(**counts))


def test_all_engines_refuse_at_once_and_the_last_request_is_waited_for(
    server: ServerChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {ONE: [2, 1, 0, 0, 0], OTHER: [1, 1, None, 1, 0]}  # None: no answer in time
    asked: list[Path] = []

    def answer(engine: Path, *_: object) -> SimpleNamespace | None:
        asked.append(engine)
        count = left[engine].pop(0)
        return None if count is None else unfinished(num_running=count, num_waiting=0)

    monkeypatch.setattr(connection, "ask", answer)
    server.drain(60.0)
    assert asked == [ONE, OTHER] * 5


def test_a_request_that_does_not_end_is_waited_for_no_longer_than_the_limit(
    server: ServerChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ask", lambda *_: unfinished(num_running=0, num_waiting=1))
    begun = time.monotonic()
    server.drain(0.2)
    assert 0.2 <= time.monotonic() - begun < 20
