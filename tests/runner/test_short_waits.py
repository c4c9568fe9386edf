from __future__ import annotations

import threading

import pytest

from tidewheel.runner.thread_count import HOLDER, ShortWaits
from tidewheel_kernels.native.library import thread_runtimes


def holders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == HOLDER]


def test_a_team_is_held_until_waits_are_long_again(monkeypatch: pytest.MonkeyPatch) -> None:
    if [name for name in thread_runtimes() if "libgomp" not in name]:
        pytest.skip("torch has another OpenMP runtime")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    before, waits = holders(), ShortWaits()
    waits.turn(True)
    waits.turn(True)
    (held,) = set(holders()) - set(before)
    waits.turn(False)
    held.join(60)
    assert not held.is_alive()


def test_a_given_policy_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    before, waits = holders(), ShortWaits()
    waits.turn(True)
    assert holders() == before
