from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from tidewheel_process.child import Child
from tidewheel_process.current_process import STOP_SIGNALS

_END_TIMEOUT_S = 5.0


class Guard(contextlib.AbstractContextManager["Guard"]):
    """Helper process that cleans up when the `with` block or this process ends, however it ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """`command`: a program that calls `guard`."""
        self._command = command
        self._environment = dict(environment)
        self._reader, self._writer = os.pipe()  # the kernel closes the writer with this process
        self._child = self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def keep(self) -> None:
        """Restart an ended guard."""
        if self._child.has_ended:
            with contextlib.suppress(OSError):
                self._child = self._start()

    def _start(self) -> Child:
        return Child(self._command, stdin=self._reader, env=self._environment)

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)
        os.close(self._writer)
        if not self._child.ends_within(_END_TIMEOUT_S):
            self._child.kill()


def guard(clean_up: Callable[[], object]) -> None:
    """Wait until the guarded process or its `with` block ends, then clean up."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    clean_up()
