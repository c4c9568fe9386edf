"""Models that are loaded again while the others serve."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from support.triton.serving import wait_for
from tidewheel.adapter.stub_process import Presence
from tidewheel.server import model_reloads
from tidewheel.server.model_reloads import (
    GIVE_BACK_S,
    KEPT_S,
    MAX_SHARED_BYTES,
    PendingReloads,
    SharedMemoryRelief,
    StubId,
)


def test_a_model_is_loaded_until_a_new_front_end_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path))
    calls: list[str] = []

    def reload(model: str) -> None:
        calls.append(model)
        if len(calls) == 1:
            raise OSError("no weights")

    Presence("other")
    notes: list[str] = []
    reloads = PendingReloads(notes.append)
    reloads.start("demo", reload)
    wait_for(lambda: len(calls) == 2, 60, "another try")
    assert notes == ["model 'demo' cannot be loaded again, and is tried again: no weights"]
    assert reloads.look() == "demo"
    Presence("demo")
    assert reloads.look() == ""
    assert calls == ["demo", "demo"]


def test_reloads_of_an_unloaded_model_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path))
    reloads = PendingReloads(pytest.fail)
    for model in ("a", "b"):
        reloads.start(model, lambda _: pytest.fail("loaded"), 3600.0)
    reloads.cancel("a")
    assert reloads.look() == "b"
    reloads.cancel()
    assert reloads.look() == ""


def test_a_reload_that_ends_during_a_cancel_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path))
    reloads = PendingReloads(pytest.fail)
    for _ in range(2):
        reloads.start("a", lambda _: pytest.fail("loaded"), 3600.0)
    first, second = reloads._pending

    class EndsMeanwhile(threading.Event):
        def set(self) -> None:
            super().set()
            reloads._pending.remove(first)  # as `look` does on another thread

    first = reloads._pending[0] = first._replace(cancelled=EndsMeanwhile())
    reloads.cancel("a")
    assert second.cancelled.is_set()


def test_a_pending_that_is_cancelled_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path))
    reloads = PendingReloads(pytest.fail)
    reloads.start("demo", lambda _: pytest.fail("loaded"), 3600.0)
    (pending,) = reloads._pending
    reloads.cancel()
    assert pending.cancelled.is_set()
    assert reloads.look() == ""


def test_what_is_told_of_reloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path))
    notes: list[str] = []
    reloads = PendingReloads(notes.append)
    reloads.start("grown", lambda _: None, while_it_serves=True)
    assert reloads.look() == ""
    reloads.start("demo", lambda _: None)
    assert reloads.look() == "demo"
    assert notes == []
    Presence("demo")
    assert reloads.look() == ""
    assert "model 'demo' is loaded again after " in notes[0]
    reloads.start("demo", lambda _: None, 3600.0)
    reloads.cancel()
    assert reloads.look() == ""


class TestSharedMemoryRelief:
    OLD, NEW = (StubId(pid, start_ticks=pid) for pid in (11, 12))

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr(model_reloads, "time", SimpleNamespace(monotonic=lambda: clock.now))
        return clock

    def test_front_ends_are_replaced_one_at_a_time(self, clock: SimpleNamespace) -> None:
        notes: list[str] = []
        loads: list[str] = []
        held = {self.OLD.pid: MAX_SHARED_BYTES, self.NEW.pid: 0}
        relief = SharedMemoryRelief(held.__getitem__, notes.append)
        reloads = SimpleNamespace(start=lambda model, reload, *, while_it_serves: reload(model))

        def look(*stubs: StubId) -> None:
            relief.look(dict.fromkeys(stubs, "demo"), cast(PendingReloads, reloads), loads.append)

        look(self.OLD)
        assert (loads, notes) == ([], [])
        held[self.OLD.pid] += 1
        look(self.OLD)
        look(self.OLD, self.NEW)
        assert loads == ["demo"]
        assert notes == ["a front end of model 'demo' holds 128 MiB of shared memory; loading it again"]
        clock.now += GIVE_BACK_S
        look(self.OLD, self.NEW)
        look(self.OLD, self.NEW)
        assert loads == ["demo"]
        assert notes[1:] == [
            "128 MiB of shared memory of model 'demo' stay: Triton keeps a front end that was replaced"
        ]
        clock.now += KEPT_S
        held[self.NEW.pid] = 1 << 30
        look(self.NEW)
        assert loads == ["demo", "demo"]
