"""Readings of /proc."""

from __future__ import annotations

import os
import subprocess

import pytest

from tidewheel import processor_use
from tidewheel.processor_use import ProcessorMeter


def test_use_is_shares_of_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = ProcessorMeter(os.getppid(), counts_waits=True)
    assert meter.read() is None  # not due
    monkeypatch.setattr(processor_use, "PERIOD_S", 0.0)
    for _ in range(200_000):
        pass
    use = meter.read()
    assert use is not None
    assert use.used > 0.0 and use.idle >= 0.0 and use.waited >= 0.0


def test_an_ended_process_uses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_use, "PERIOD_S", 0.0)
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    assert ProcessorMeter(ended.pid).read() is not None
