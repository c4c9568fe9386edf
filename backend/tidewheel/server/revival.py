"""Answers to a death: a limit of restarts for the server, and the load of one model while the others serve.

The same load gives shared memory back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from tidewheel.adapter.presence import front_ends
from tidewheel.byte_sizes import shown_bytes
from tidewheel.engine.launcher import RestartPolicy
from tidewheel.server import CrashLoop
from tidewheel.server.processes import Process

MAX_SHARED_BYTES = 128 << 20  # of a front end, with which Triton passes tensors on
GIVE_BACK_S = 60.0  # at least, between two front ends that give it back
KEPT_S = 3600.0  # the same, while Triton keeps one of them


class Restarts:
    """Count of deaths, in time that the server served."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self._policy = policy or RestartPolicy()
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
    """Thread that has a model loaded again after a delay. It is over when a new front end serves the model."""

    def __init__(
        self, model: str, reload: Callable[[str], None], delay_s: float, *, while_it_serves: bool = False
    ) -> None:
        self.model = model
        self.while_it_serves = while_it_serves
        self._reload = reload
        self._delay_s = delay_s
        self._before = front_ends(model)
        self._since = time.monotonic()
        self._failure = ""
        self._cancelled = threading.Event()
        threading.Thread(target=self._run, name=f"revival of {model}", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return not front_ends(self.model) <= self._before

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._since

    def new_failure(self) -> str:
        """Return why the last load failed, once."""
        failure, self._failure = self._failure, ""
        return failure

    def cancel(self) -> None:
        self._cancelled.set()

    def _run(self) -> None:
        num_failures = 0
        while not self._cancelled.wait(self._delay_s):
            try:
                self._reload(self.model)
                return
            except OSError as error:
                num_failures += 1
                self._delay_s = RestartPolicy().delay_s(num_failures)
                self._failure = f"model {self.model!r} cannot be loaded again, and is tried again: {error}"


class Revivals:
    """Pending reloads of models, each until a new front end serves its model."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._open: list[Revival] = []

    def start(
        self, model: str, reload: Callable[[str], None], delay_s: float = 0.0, *, while_it_serves: bool = False
    ) -> None:
        self._open.append(Revival(model, reload, delay_s, while_it_serves=while_it_serves))

    def look(self) -> str:
        """Report failures and successes. Return a model that still has no front end, or an empty string."""
        for revival in self._open:
            if failure := revival.new_failure():
                self._note(failure)
        for revival in [revival for revival in self._open if revival.is_over]:
            self._open.remove(revival)
            self._note(f"model {revival.model!r} is loaded again after {revival.age_s:.1f} s")
        return next((revival.model for revival in self._open if not revival.while_it_serves), "")

    def cancel(self, model: str = "") -> None:
        """Cancel the pending reloads of `model`, by default of all models."""
        ended = [revival for revival in self._open if model in ("", revival.model)]
        for revival in ended:
            revival.cancel()
        self._open = [revival for revival in self._open if revival not in ended]


class GiveBack:
    """Replacement of front ends whose shared memory has grown, because Triton never shrinks it; requests go on.

    One at a time: Triton keeps a front end while a gRPC stream is open that had a request for it, and for ever after
    a request over such a stream that Triton itself refused, or a stream that was cancelled as it ended.
    """

    def __init__(self, shared_bytes: Callable[[int], int], note: Callable[[str], None]) -> None:
        """Take what a process holds, and where to tell."""
        self._shared_bytes = shared_bytes
        self._note = note
        self._replaced: set[tuple[int, int]] = set()  # stubs, by process id and start
        self._next = 0.0

    def look(self, serving: Mapping[Process, str], revivals: Revivals, reload: Callable[[str], None]) -> None:
        """Replace one, if it is time. `serving`: stubs and their models."""
        now = time.monotonic()
        sizes = {stub: self._shared_bytes(stub.pid) for stub in serving if now >= self._next}
        grown = next((stub for stub, size in sizes.items() if size > MAX_SHARED_BYTES), None)
        if grown is None:
            return
        model, size = serving[grown], shown_bytes(sizes[grown])
        if any((stub.pid, stub.started) in self._replaced for stub in serving):
            self._next = now + KEPT_S
            self._note(f"{size} of shared memory of model {model!r} stay: Triton keeps a front end that was replaced")
            return
        self._next = now + GIVE_BACK_S
        self._note(f"a front end of model {model!r} holds {size} of shared memory; loading it again")
        self._replaced.add((grown.pid, grown.started))
        revivals.start(model, reload, while_it_serves=True)
