"""The circuit breaker of admission: sheds classes from the lowest up while errors or waiting are over their limit."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from tidewheel.errors import Busy
from tidewheel.request import Priority

PERIOD_S = 5.0  # for which a state is kept before it is judged
MAX_PERIOD_S = 60.0
NUM_PROBES = 5  # requests of the class on trial that a half-open breaker lets in
MIN_ENDS = 20  # ended requests before their error rate opens a closed breaker
MIN_STARTS = 5  # started requests before their queue time opens it
WINDOW = 50  # observations, about, that a mean covers

_MAX_LEVEL = 3  # all but CRITICAL
_WORSE = 2.0  # over the limit by this factor sheds one class more at once; by its square, two


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Signal:
    """Mean of the last observations, against a limit.

    Old observations fade by number, not by time, so slow traffic that only fails is seen like fast traffic.
    """

    name: str
    unit: str
    limit: float | None  # None: the signal never opens the breaker
    mean: float = 0.0
    count: int = 0

    def observe(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / min(self.count, WINDOW)

    def excess(self, min_count: int) -> float:
        """Return mean over limit; 0 with fewer observations than `min_count`, or without a limit."""
        return self.mean / self.limit if self.limit is not None and self.count >= min_count else 0.0


class Breaker:
    """Sheds as many classes as its level says (Nygard, "Release It!", 2007: closed, open, half open).

        CLOSED     → OPEN        a signal is over its limit: shed LOW; over twice the limit also NORMAL, over four
                                 times also HIGH
        OPEN       → OPEN        the period ends, and the signals in it were over a limit: shed one class more
        OPEN       → HALF_OPEN   the period ends, and they were not: let in `NUM_PROBES` of the best shed class
        HALF_OPEN  → OPEN        the probes are over a limit: shed the same classes, for twice the time
        HALF_OPEN  → CLOSED      they are not, or a period passes without a verdict: shed one class less; if classes
                                 are left, the breaker is half open again, for the next one

    The queue time of a class and of better ones decides whether the class is shed, so a backlog of LOW behind better
    classes sheds LOW alone. CRITICAL is never shed. Every transition forgets all observations. Time passes only in
    calls.
    """

    def __init__(self, error_rate: float | None, queue_time_s: float | None) -> None:
        self._errors = Signal("error rate", "", error_rate)
        # By level: each has the queue times of the classes that are served at that level.
        self._queue_times = [Signal("queue time", " s", queue_time_s) for _ in Priority]
        self.state = BreakerState.CLOSED
        self.level = 0
        self.num_shed = [0] * len(Priority)  # by class
        self._period = PERIOD_S
        self._until = 0.0  # when the present state is judged, unless closed
        self._num_probes = 0
        self._reason = ""

    def check(self, service_class: Priority, now: float) -> None:
        """Raise `Busy` for a request of a class that is shed. Must be the last check: a passing probe counts."""
        self._advance(now)
        best_shed = _best_shed(self.level)
        if service_class < best_shed:
            return
        if self.state is BreakerState.HALF_OPEN and service_class == best_shed and self._num_probes < NUM_PROBES:
            self._num_probes += 1
            return
        self.num_shed[service_class - 1] += 1
        raise Busy(
            f"overload: requests of class {service_class.name} are refused, {self._reason}",
            retry_after_ms=math.ceil(1e3 * max(self._until - now, 0.05)),
        )

    def observe_end(self, failed: bool, now: float) -> None:
        """Learn from an admitted request that ended; `failed` if by an error of the server."""
        if self._errors.limit is not None:
            self._errors.observe(float(failed))
            self._advance(now)

    def observe_queue_time(self, seconds: float, service_class: Priority, now: float) -> None:
        """Learn from a request that arrived in this class and waited so long until its start, or still waits."""
        if self._queue_times[0].limit is not None:
            for signal in self._queue_times[: _best_shed(service_class)]:
                signal.observe(seconds)
            self._advance(now)

    def _advance(self, now: float) -> None:
        if self.state is BreakerState.CLOSED:
            if self._excess(0, MIN_ENDS, MIN_STARTS) >= 1.0:
                self._open(now, 1)
        elif self.state is BreakerState.HALF_OPEN:
            self._judge_probes(now)
        elif now >= self._until:
            if self._excess(self.level, 1, 1) >= 1.0:
                self._open(now, self.level + 1)
            else:
                self._enter(BreakerState.HALF_OPEN, now)

    def _judge_probes(self, now: float) -> None:
        is_over = now >= self._until
        needed = 1 if is_over else NUM_PROBES
        signals = (self._errors, self._queue_times[self.level - 1])
        if self._excess(self.level - 1, needed, needed) >= 1.0:
            self._period = min(2.0 * self._period, MAX_PERIOD_S)
            self._open(now, self.level)
        elif is_over or all(signal.limit is None or signal.count >= NUM_PROBES for signal in signals):
            self._period = PERIOD_S
            self.level -= 1
            self._enter(BreakerState.HALF_OPEN if self.level else BreakerState.CLOSED, now)

    def _open(self, now: float, level: int) -> None:
        worst = max(self._errors, *self._queue_times, key=lambda signal: signal.excess(1))
        self._reason = f"{worst.name} {worst.mean:.3g}{worst.unit} is over its limit of {worst.limit:g}{worst.unit}"
        if self.state is BreakerState.CLOSED:
            while level < _MAX_LEVEL and self._excess(level, MIN_ENDS, MIN_STARTS) >= _WORSE**level:
                level += 1
        self.level = min(level, _MAX_LEVEL)
        self._enter(BreakerState.OPEN, now)

    def _enter(self, state: BreakerState, now: float) -> None:
        self.state = state
        self._until = now + self._period
        self._num_probes = 0
        for signal in (self._errors, *self._queue_times):
            signal.mean, signal.count = 0.0, 0

    def _excess(self, level: int, min_ends: int, min_starts: int) -> float:
        """Return how far the signals that count at a level are over their limits; 1 is at the limit."""
        return max(self._errors.excess(min_ends), self._queue_times[level].excess(min_starts))


def _best_shed(level: int) -> int:
    """Return the best class that is shed at a level; all below it are shed too. 5 at level 0: no class."""
    return Priority.LOW + 1 - level
