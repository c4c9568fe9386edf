"""Readings of /proc."""

from __future__ import annotations

import os
import subprocess

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
