"""Readings of /proc."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tidewheel.processor_use import ProcessorMeter


def test_use_is_shares_of_one_processor() -> None:
    assert ProcessorMeter().read() is None  # not due
    meter = ProcessorMeter(os.getppid(), counts_waits=True, period_s=0.0)
    for _ in range(200_000):
        pass
    use = meter.read()
    assert use is not None
    assert use.used > 0.0 and use.idle >= 0.0 and use.waited >= 0.0


def test_an_ended_process_uses_nothing() -> None:
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    assert ProcessorMeter(ended.pid, period_s=0.0).read() is not None


@pytest.mark.parametrize(("niceness", "niced"), [(0, 0.75), (5, 0.0)])
def test_processes_that_give_way_count_with_their_system_calls_unless_this_one_does(
    monkeypatch: pytest.MonkeyPatch, niceness: int, niced: float
) -> None:
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(os, "getpriority", lambda *_: niceness)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(time, "monotonic", iter((0.0, 100 * tick_s)).__next__)
    monkeypatch.setattr(time, "process_time", iter((0.0, 100 * tick_s)).__next__)
    lines = iter((b"cpu0 0 0 0 0 0 0 0", b"cpu0 110 30 60 0 0 0 0"))  # user, niced and system time, of 100 ticks
    monkeypatch.setattr(Path, "read_bytes", lambda _: next(lines))
    use = ProcessorMeter(period_s=0.0).read()
    # Of 200 ticks this process used 100; of the others' 40 ticks in user mode, 30 were niced.
    assert use is not None and use.niced == pytest.approx(niced) and use.idle == 0.0
