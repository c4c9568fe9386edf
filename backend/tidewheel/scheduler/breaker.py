"""The circuit breaker of admission: sheds classes from the lowest up while errors or waiting are over their limit."""

from __future__ import annotations

import enum
import math

from tidewheel.errors import Busy
from tidewheel.request import Priority

PERIOD_S = 5.0  # the breaker stays as it is for so long, then judges
MAX_PERIOD_S = 60.0
NUM_PROBES = 5  # requests of the class on trial that a half-open breaker lets in
MIN_ENDS = 20  # ended requests before their error rate opens a closed breaker
MIN_STARTS = 5  # started ones before their queue time does
WINDOW = 50  # observations, about, that a mean covers

_MAX_LEVEL = 3  # all but CRITICAL
_WORSE = 2.0  # over the limit by this factor sheds one class more at once; by its square, two


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Signal:
    """Mean of the last observations, against a limit. None: there is no limit.

    Old ones fade by number, not by time: slow traffic that only fails is seen like fast traffic that does.
    """

    __slots__ = ("count", "limit", "mean", "name", "unit")

    def __init__(self, name: str, unit: str, limit: float | None) -> None:
        self.name = name
        self.unit = unit
        self.limit = limit
        self.mean = 0.0
        self.count = 0

    def observe(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / min(self.count, WINDOW)

    def excess(self, min_count: int) -> float:
        """Mean over limit; 0 with fewer observations than that, or without a limit."""
        return self.mean / self.limit if self.limit is not None and self.count >= min_count else 0.0

    def forget(self) -> None:
        self.mean, self.count = 0.0, 0


class Breaker:
    """Closed, open, half open (Nygard, "Release It!", 2007), with a level: the number of classes that are shed.

        CLOSED     → OPEN        a signal is over its limit: LOW is shed (NORMAL too if it is over twice the limit,
                                 HIGH too if it is over four times)
        OPEN       → OPEN        the period ends and what was seen in it is still over: one class more
        OPEN       → HALF_OPEN   the period ends and it is not: `NUM_PROBES` requests of the best shed class may in
        HALF_OPEN  → OPEN        they are over the limit: the same classes, for twice the time
        HALF_OPEN  → CLOSED      they are not, or a period passes without a verdict: one class less; closed at none,
                                 else half open again, for the next class

    Whether a class is shed is judged by the queue time of that class and better ones, so a backlog of LOW behind
    better classes sheds LOW and nobody else. CRITICAL is never shed. Every transition forgets what was seen before
    it. Time passes only in calls.
    """

    def __init__(self, error_rate: float | None, queue_time_s: float | None) -> None:
        self._errors = Signal("error rate", "", error_rate)
        # By level: of the classes that are served at it.
        self._queue_times = [Signal("queue time", " s", queue_time_s) for _ in Priority]
        self.state = BreakerState.CLOSED
        self.level = 0
        self.num_shed = [0] * len(Priority)  # by class
        self._period = PERIOD_S
        self._until = 0.0  # when the present state is judged, unless closed
        self._num_probes = 0
        self._reason = ""

    def check(self, service_class: Priority, now: float) -> None:
        """Raises `Busy` for a request of a class that is shed. The last of all checks: a probe that passes counts."""
        self._advance(now)
        if service_class < _best_shed(self.level):
            return
        is_on_trial = self.state is BreakerState.HALF_OPEN and service_class == _best_shed(self.level)
        if is_on_trial and self._num_probes < NUM_PROBES:
            self._num_probes += 1
            return
        self.num_shed[service_class - 1] += 1
        raise Busy(
            f"overload: requests of class {service_class.name} are refused, {self._reason}",
            retry_after_ms=math.ceil(1e3 * max(self._until - now, 0.05)),
        )

    def observe_end(self, failed: bool, now: float) -> None:
        """An admitted request ended; failed: by an error of ours."""
        if self._errors.limit is not None:
            self._errors.observe(float(failed))
            self._advance(now)

    def observe_queue_time(self, seconds: float, service_class: Priority, now: float) -> None:
        """A request that came in this class started after so long, or has waited for so long and has not."""
        if self._queue_times[0].limit is not None:
            for signal in self._queue_times[: _best_shed(0) - service_class]:
                signal.observe(seconds)
            self._advance(now)

    def _advance(self, now: float) -> None:
        if self.state is BreakerState.CLOSED:
            if self._excess(0, MIN_ENDS, MIN_STARTS) >= 1.0:
                self._open(now, 1)
        elif self.state is BreakerState.OPEN:
            self._judge_open(now)
        else:
            self._judge_probes(now)

    def _judge_open(self, now: float) -> None:
        if now < self._until:
            return
        if self._excess(self.level, 1, 1) >= 1.0:
            self._open(now, self.level + 1)
        else:
            self._half_open(now)

    def _judge_probes(self, now: float) -> None:
        is_over = now >= self._until
        needed = 1 if is_over else NUM_PROBES
        if self._excess(self.level - 1, needed, needed) >= 1.0:
            self._period = min(2.0 * self._period, MAX_PERIOD_S)
            self._open(now, self.level)
        elif is_over or self._has_verdict():
            self._recover(now)

    def _has_verdict(self) -> bool:
        signals = (self._errors, self._queue_times[self.level - 1])
        return all(signal.limit is None or signal.count >= NUM_PROBES for signal in signals)

    def _open(self, now: float, level: int) -> None:
        signal = max(self._errors, *self._queue_times, key=lambda signal: signal.excess(1))
        self._reason = (
            f"{signal.name} {signal.mean:.3g}{signal.unit} is over its limit of {signal.limit:g}{signal.unit}"
        )
        if self.state is BreakerState.CLOSED:
            while level < _MAX_LEVEL and self._excess(level, MIN_ENDS, MIN_STARTS) >= _WORSE**level:
                level += 1
        self.level = min(level, _MAX_LEVEL)
        self._enter(BreakerState.OPEN, now)

    def _half_open(self, now: float) -> None:
        self._num_probes = 0
        self._enter(BreakerState.HALF_OPEN, now)

    def _recover(self, now: float) -> None:
        self.level -= 1
        self._period = PERIOD_S
        if self.level:
            self._half_open(now)
        else:
            self._enter(BreakerState.CLOSED, now)

    def _enter(self, state: BreakerState, now: float) -> None:
        self.state = state
        self._until = now + self._period
        for signal in (self._errors, *self._queue_times):
            signal.forget()

    def _excess(self, level: int, min_ends: int, min_starts: int) -> float:
        """How far the signals that count at a level are over their limits; 1 is at the limit."""
        return max(self._errors.excess(min_ends), self._queue_times[level].excess(min_starts))


def _best_shed(level: int) -> int:
    """The best class that is shed at a level, of which each sheds that class and those below; 5 at none."""
    return Priority.LOW + 1 - level
