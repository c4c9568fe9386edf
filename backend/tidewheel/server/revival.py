"""Answers to a death: a limit of restarts for the server, and the load of one model while the others serve."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tidewheel.engine.launcher import RestartPolicy
from tidewheel.server import CrashLoop


class Restarts:
    """Count of deaths, in time that the server served."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: list[float] = []
        self._served_s = 0.0

    def next_delay_s(self, served_s: float, reason: str) -> float:
        """Return the delay after a death that followed `served_s` of service. Raise `CrashLoop` after too many."""
        self._served_s += served_s
        self._deaths = [at for at in self._deaths if self._served_s - at <= self._policy.window_s] + [self._served_s]
        if len(self._deaths) >= self._policy.max_deaths:
            raise CrashLoop(
                f"{len(self._deaths)} deaths within {self._policy.window_s:g} s of service, so the server is not "
                f"started again; the last: {reason}"
            )
        return self._policy.delay_s(len(self._deaths))


class Revival:
    """Thread that loads a model again after a delay."""

    def __init__(self, model: str, reload: Callable[[str], None], delay_s: float) -> None:
        self.model = model
        self.failure = ""
        self._reload = reload
        self._delay_s = delay_s
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"revival of {model}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def cancel(self) -> None:
        self._cancelled.set()

    def _run(self) -> None:
        if self._cancelled.wait(self._delay_s):
            return
        try:
            self._reload(self.model)
        except OSError as error:
            self.failure = f"model {self.model!r} cannot be loaded again: {error}"
