import time
from collections.abc import Callable
from dataclasses import dataclass

from tidewheel_process.child import Child


class CrashLoop(Exception):
    """Too many deaths of a process for another start to help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Delays before restarts, doubled with each death. `max_deaths` within `window_s` seconds are a crash loop."""

    first_delay_s: float = 0.25
    max_delay_s: float = 5.0
    window_s: float = 60.0
    max_deaths: int = 5

    def delay_s(self, num_deaths: int) -> float:
        doublings = min(num_deaths - 1, 30)
        return 0.0 if num_deaths == 0 else min(self.first_delay_s * 2.0**doublings, self.max_delay_s)


class DeathCount:
    """Deaths of a process, timed in seconds for which it ran."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self._policy = policy or RestartPolicy()
        self._deaths: list[float] = []
        self._served_s = 0.0

    def next_delay_s(self, served_s: float, reason: str) -> float:
        """Return the seconds to wait after a death that ended a run of `served_s`. Raise `CrashLoop`."""
        self._served_s += served_s
        self._deaths = [at for at in self._deaths if self._served_s - at <= self._policy.window_s] + [self._served_s]
        if len(self._deaths) >= self._policy.max_deaths:
            raise CrashLoop(
                f"{len(self._deaths)} deaths within {self._policy.window_s:g} s of service, so the server is not "
                f"started again; the last: {reason}"
            )
        return self._policy.delay_s(len(self._deaths))


class RestartedChild:
    """Child process that `watch` restarts after each death."""

    def __init__(
        self, name: str, start: Callable[[], Child], note: Callable[[str], None], policy: RestartPolicy | None = None
    ) -> None:
        self._name = name
        self._start = start
        self._note = note
        self._deaths = DeathCount(policy)
        self._start_at: float | None = None
        self.child = start()

    def watch(self) -> None:
        """Restart a dead child after the delay. Raise `CrashLoop`."""
        now = time.monotonic()
        if self._start_at is not None:
            if now >= self._start_at:
                self._start_at = None
                self.child = self._start()
        elif self.child.has_ended:
            reason = f"{self._name} died (process {self.child.pid}, {self.child.exit})"
            self._start_at = now + self._deaths.next_delay_s(now - self.child.started_at, reason)
            self._note(f"{reason}; starting it again")
