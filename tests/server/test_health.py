"""Readiness of `serve`, from the state of the server, tritonserver's answer and all engines."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import requests

from support.triton.serving import wait_for
from tidewheel.health_endpoint import READY, Readiness
from tidewheel.server import ServeError, run_server
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.run_server import HealthMonitor
from tidewheel_process.child import CrashLoop


class FakeWatch:
    seen: ClassVar[dict[str, Readiness | None]] = {}

    def __init__(self, link: Path) -> None:
        self.name = link.parent.name

    def look(self) -> Readiness | None:
        return self.seen[self.name]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Readiness | None]:
    monkeypatch.setattr(FakeWatch, "seen", {})
    monkeypatch.setattr(run_server, "EngineWatch", FakeWatch)
    monkeypatch.setattr(run_server, "current_engines", lambda: [Path(name) / "current" for name in FakeWatch.seen])
    return FakeWatch.seen


def make(answers: list[bool]) -> HealthMonitor:
    return HealthMonitor(Endpoints(), lambda: answers[-1])


def test_the_worst_engine_counts(seen: dict[str, Readiness | None]) -> None:
    it = make([True])
    assert it.look() == READY
    seen["one-1234"] = READY
    seen["two-1234"] = None
    assert it.look() == READY
    seen["three-1234"] = Readiness("hung", "no step")
    assert it.look() == ("hung", "three: no step")
    seen["four-1234"] = Readiness("given up", "no weights")
    assert it.look() == ("given up", "four: no weights")


def test_the_endpoint_follows_within_a_second(seen: dict[str, Readiness | None]) -> None:
    answers = [True]
    with make(answers) as it:

        def get(path: str = "ready") -> tuple[int, str]:
            answer = requests.get(f"http://127.0.0.1:{it._endpoint.port}/{path}", timeout=60)
            return answer.status_code, answer.json()["state"]

        assert it.report().state == "starting"
        assert get() == (503, "starting")
        it.server = lambda: READY
        assert get() == (200, "ready")
        seen["one-1234"] = Readiness("reloading", "")
        wait_for(lambda: get() == (503, "reloading"), 60, "an engine that is away")
        seen["one-1234"] = READY
        wait_for(lambda: get() == (200, "ready"), 60, "its return")
        answers.append(False)
        wait_for(lambda: get() == (503, "stopped"), 60, "the silence of tritonserver")
        it.server = lambda: Readiness("draining")
        assert get() == (503, "draining")
        assert get("live") == (200, "draining")


def test_ready_names_the_devices_of_ranks(seen: dict[str, Readiness | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_server, "devices_of_ranks", lambda: {"demo": ["cuda:0", "cuda:1"]})
    with make([True]) as it:
        url = f"http://127.0.0.1:{it._endpoint.port}"
        answers = [requests.get(f"{url}/{path}", timeout=60).json() for path in ("ready", "live")]
    assert [answer.get("ranks") for answer in answers] == [{"demo": ["cuda:0", "cuda:1"]}, None]


@pytest.mark.usefixtures("seen")
def test_who_is_silent_before_the_start_is_not_asked() -> None:
    it = make([False])
    assert it.ask() == READY
    it.server = lambda: READY
    assert it.ask().state == "stopped"


def test_what_cannot_be_examined_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_server, "current_engines", lambda: 1 / 0)
    with make([True]) as it:
        it.server = lambda: READY
        wait_for(lambda: "division" in it.report().reason, 60, "the error")
        assert not it.report().is_ready


def test_an_engine_that_is_given_up_ends_the_server(seen: dict[str, Readiness | None]) -> None:
    with make([True]) as it:
        it.raise_if_given_up()
        seen["one-1234"] = Readiness("given up", "it died 5 times")
        wait_for(lambda: not it._seen["engines"].is_live, 60, "the look")
        with pytest.raises(CrashLoop, match="an engine is given up: one: it died 5 times"):
            it.raise_if_given_up()


@pytest.mark.usefixtures("seen")
def test_a_taken_port_is_named_with_its_option() -> None:
    with make([True]) as it:
        port = it._endpoint.port
        with pytest.raises(ServeError, match=f"port {port} .--health-port.: "):
            HealthMonitor(Endpoints(health=port), lambda: True)
