"""Models that are loaded again while the others serve."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from support.triton.serving import wait_for
from tidewheel.server import model_reloads
from tidewheel.server.model_reloads import (
    GIVE_BACK_S,
    KEPT_S,
    MAX_SHARED_BYTES,
    PendingReloads,
    SharedMemoryRelief,
    StubId,
)

SERVING = {StubId(11, 11): "demo", StubId(12, 12): "other"}
WITH_NEW = {StubId(12, 12): "other", StubId(13, 13): "demo"}


def test_a_model_is_loaded_until_a_new_front_end_serves() -> None:
    calls: list[str] = []

    def reload(model: str) -> None:
        calls.append(model)
        if len(calls) == 1:
            raise OSError("no weights")

    notes: list[str] = []
    reloads = PendingReloads(notes.append)
    reloads.start("demo", SERVING, reload)
    wait_for(lambda: len(calls) == 2, 60, "another try")
    assert notes == ["model 'demo' cannot be loaded again, and is tried again: no weights"]
    assert reloads.look(SERVING) == "demo"
    assert reloads.look({**SERVING, StubId(13, 13): "other"}) == "demo"
    assert reloads.look(WITH_NEW) == ""
    assert calls == ["demo", "demo"]


def test_reloads_of_an_unloaded_model_end() -> None:
    reloads = PendingReloads(pytest.fail)
    for model in ("a", "b"):
        reloads.start(model, SERVING, lambda _: pytest.fail("loaded"), 3600.0)
    reloads.cancel("a")
    assert reloads.look(SERVING) == "b"
    reloads.cancel()
    assert reloads.look(SERVING) == ""


def test_a_reload_that_ends_during_a_cancel_hides_no_other() -> None:
    reloads = PendingReloads(pytest.fail)
    for _ in range(2):
        reloads.start("a", SERVING, lambda _: pytest.fail("loaded"), 3600.0)
    first, second = reloads._pending

    class EndsMeanwhile(threading.Event):
        def set(self) -> None:
            super().set()
            reloads._pending.remove(first)  # as `look` does on another thread

    first = reloads._pending[0] = first._replace(cancelled=EndsMeanwhile())
    reloads.cancel("a")
    assert second.cancelled.is_set()


def test_a_pending_that_is_cancelled_loads_nothing() -> None:
    reloads = PendingReloads(pytest.fail)
    reloads.start("demo", SERVING, lambda _: pytest.fail("loaded"), 3600.0)
    (pending,) = reloads._pending
    reloads.cancel()
    assert pending.cancelled.is_set()
    assert reloads.look(SERVING) == ""


def test_what_is_told_of_reloads() -> None:
    notes: list[str] = []
    reloads = PendingReloads(notes.append)
    reloads.start("grown", SERVING, lambda _: None, while_it_serves=True)
    assert reloads.look(SERVING) == ""
    reloads.start("demo", SERVING, lambda _: None)
    assert reloads.look(SERVING) == "demo"
    assert notes == []
    assert reloads.look(WITH_NEW) == ""
    assert "model 'demo' is loaded again after " in notes[0]
    reloads.start("demo", SERVING, lambda _: None, 3600.0)
    reloads.cancel()
    assert reloads.look(SERVING) == ""


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
        reloads = SimpleNamespace(start=lambda model, serving, reload, *, while_it_serves: reload(model))

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
