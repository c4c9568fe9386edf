"""How often a server is started again, and how a model is loaded again while the others serve."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from support.triton.serving import wait_for
from tidewheel.adapter.presence import Presence
from tidewheel.engine.launcher import RestartPolicy
from tidewheel.server import CrashLoop, revival
from tidewheel.server.processes import Process
from tidewheel.server.revival import GIVE_BACK_S, KEPT_S, MAX_SHARED_BYTES, GiveBack, Restarts, Revival, Revivals


def test_delays_grow_and_a_crash_loop_ends() -> None:
    restarts = Restarts(RestartPolicy(first_delay_s=1, window_s=60, max_deaths=4))
    assert [restarts.next_delay_s(10, "") for _ in range(3)] == [1, 2, 4]
    with pytest.raises(CrashLoop, match=r"4 deaths within 60 s of service, .* the last: no memory"):
        restarts.next_delay_s(10, "no memory")


def test_old_deaths_are_forgotten_by_time_of_service() -> None:
    restarts = Restarts(RestartPolicy(first_delay_s=1, window_s=60, max_deaths=4))
    assert [restarts.next_delay_s(50, "") for _ in range(5)] == [1, 2, 2, 2, 2]
    restarts.next_delay_s(0, "a load of any length fails")
    with pytest.raises(CrashLoop):
        restarts.next_delay_s(0, "again")


def test_a_model_is_loaded_until_a_new_front_end_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path))
    calls: list[str] = []

    def reload(model: str) -> None:
        calls.append(model)
        if len(calls) == 1:
            raise OSError("no weights")

    Presence("other")
    revival = Revival("demo", reload, 0.0)
    wait_for(lambda: len(calls) == 2, 60, "another try")
    assert revival.new_failure() == "model 'demo' cannot be loaded again, and is tried again: no weights"
    assert revival.new_failure() == ""
    assert not revival.is_over
    Presence("demo")
    assert revival.is_over
    assert calls == ["demo", "demo"]


def test_revivals_of_an_unloaded_model_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path))
    revivals = Revivals(pytest.fail)
    for model in ("a", "b"):
        revivals.start(model, lambda _: pytest.fail("loaded"), 3600.0)
    revivals.cancel("a")
    assert revivals.look() == "b"
    revivals.cancel()
    assert revivals.look() == ""


def test_a_revival_that_is_cancelled_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path))
    revival = Revival("demo", lambda _: pytest.fail("loaded"), 3600.0)
    revival.cancel()
    assert not revival.is_over


def test_what_is_told_of_revivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path))
    notes: list[str] = []
    revivals = Revivals(notes.append)
    revivals.start("grown", lambda _: None, while_it_serves=True)
    assert revivals.look() == ""
    revivals.start("demo", lambda _: None)
    assert revivals.look() == "demo"
    assert notes == []
    Presence("demo")
    assert revivals.look() == ""
    assert "model 'demo' is loaded again after " in notes[0]
    revivals.start("demo", lambda _: None, 3600.0)
    revivals.cancel()
    assert revivals.look() == ""


class TestGiveBack:
    OLD, NEW = (Process(pid=pid, parent=1, name="stub", state="S", started=pid) for pid in (11, 12))

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr(revival, "time", SimpleNamespace(monotonic=lambda: clock.now))
        return clock

    def test_front_ends_are_replaced_one_at_a_time(self, clock: SimpleNamespace) -> None:
        notes: list[str] = []
        loads: list[str] = []
        held = {self.OLD.pid: MAX_SHARED_BYTES, self.NEW.pid: 0}
        give_back = GiveBack(held.__getitem__, notes.append)
        revivals = SimpleNamespace(start=lambda model, reload, *, while_it_serves: reload(model))

        def look(*stubs: Process) -> None:
            give_back.look(dict.fromkeys(stubs, "demo"), cast(Revivals, revivals), loads.append)

        look(self.OLD)
        assert (loads, notes) == ([], [])
        held[self.OLD.pid] += 1
        look(self.OLD)
        look(self.OLD, self.NEW)
        assert loads == ["demo"]
        assert notes == ["a front end of model 'demo' holds 128 MiB of shared memory; loading it again"]
        clock.now += GIVE_BACK_S
        look(self.OLD._replace(state="R"), self.NEW)
        look(self.OLD, self.NEW)
        assert loads == ["demo"]
        assert notes[1:] == [
            "128 MiB of shared memory of model 'demo' stay: Triton keeps a front end that was replaced"
        ]
        clock.now += KEPT_S
        held[self.NEW.pid] = 1 << 30
        look(self.NEW)
        assert loads == ["demo", "demo"]
