"""Time from a fault of the engine to `/ready` 503 and to the metric, and to 200 after its end, with the demo model.

python benchmarks/fault_notice.py --save

killed     SIGKILL
stopped    SIGSTOP, continued when it is told
frozen     SIGSTOP for good: the engine is ended and started again
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil
import requests

from serving import Address, metric, served
from study import ROOT, Study, show, summary

REPEATS = 3  # five deaths in a minute are a crash loop
LIMIT_S = 120.0
SETTINGS = {"dtype": "float32", "num_threads": 1}


class Notice(NamedTuple):
    """Seconds."""

    not_ready: float
    metric_0: float
    ready_again: float  # from the end of the fault, or from the kill
    state: str


class Faults:
    def __init__(self, address: Address) -> None:
        self._address = address

    def killed(self) -> Notice:
        return self._watch(lambda pid: os.kill(pid, signal.SIGKILL), lambda _: None)

    def stopped(self) -> Notice:
        return self._watch(lambda pid: os.kill(pid, signal.SIGSTOP), lambda pid: os.kill(pid, signal.SIGCONT))

    def frozen(self) -> Notice:
        return self._watch(lambda pid: os.kill(pid, signal.SIGSTOP), _wait_gone)

    def _watch(self, begin: Callable[[int], None], end: Callable[[int], None]) -> Notice:
        _until(lambda: self._state() == "ready" and self._metric() == 1)
        pid = _engine_pid()
        began = time.monotonic()
        begin(pid)
        _until(lambda: self._state() != "ready")
        not_ready, state = time.monotonic() - began, self._state()
        _until(lambda: self._metric() == 0)
        metric_0 = time.monotonic() - began
        end(pid)
        ended = began if state in ("stopped", "reloading") else time.monotonic()
        _until(lambda: self._state() == "ready")
        return Notice(not_ready, metric_0, time.monotonic() - ended, state)

    def _state(self) -> str:
        return str(requests.get(f"http://{self._address.health}/ready", timeout=5).json()["state"])

    def _metric(self) -> float:
        return metric(self._address, "tidewheel_engine_ready")


def _engine_pid() -> int:
    below = psutil.Process().children(recursive=True)
    return next(one.pid for one in below if "tidewheel.engine.process" in one.cmdline())


def _wait_gone(pid: int) -> None:
    _until(lambda: not psutil.pid_exists(pid))


def _until(condition: Callable[[], bool]) -> None:
    """Raise RuntimeError if the condition does not come true."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {LIMIT_S:g} s")
        time.sleep(0.005)


def main() -> None:
    study = Study("fault_notice", __doc__, "torch")
    study.begin()
    with served(ROOT / "model_repository" / "demo" / "1" / "weights", SETTINGS) as address:
        faults = Faults(address)
        runs = {name: [getattr(faults, name)() for _ in range(1 if name == "frozen" else REPEATS)]
                for name in ("stopped", "frozen", "killed")}  # fmt: skip
    figures = {
        name: {field: summary([getattr(one, field) for one in notices]) for field in Notice._fields[:3]}
        for name, notices in runs.items()
    }
    show({"fault": name, **{field: one["median"] for field, one in each.items()}} for name, each in figures.items())
    study.save({"settings": SETTINGS, "seconds": figures})


if __name__ == "__main__":
    main()
