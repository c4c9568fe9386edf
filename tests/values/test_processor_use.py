"""Readings of /proc."""

from __future__ import annotations

import os
import subprocess
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


@pytest.mark.parametrize(("niceness", "niced"), [(0, True), (5, False)])
def test_processes_that_give_way_count_unless_this_one_does(
    monkeypatch: pytest.MonkeyPatch, niceness: int, niced: bool
) -> None:
    monkeypatch.setattr(os, "getpriority", lambda *_: niceness)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    ticks = iter((0, 1 << 40))
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"cpu0 7 %d 7 7 7 7" % next(ticks))
    use = ProcessorMeter(period_s=0.0).read()
    assert use is not None and (use.niced > 0.0) == niced and use.idle == 0.0
