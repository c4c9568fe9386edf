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

_SHED_FROM = (Priority.LOW, Priority.NORMAL, Priority.HIGH)  # by level 1, 2, 3: this class and those below it
_WORSE = 2.0  # over the limit by this factor sheds one class more at once; by its square, two


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Signal:
    """Mean of the last observations, against a limit. None: there is no limit.

    Old ones fade by number, not by time: slow traffic that only fails is seen like fast traffic that does.
    """

    __slots__ = ("count", "limit", "mean", "min_count", "name", "unit")

    def __init__(self, name: str, unit: str, limit: float | None, min_count: int) -> None:
        self.name = name
        self.unit = unit
        self.limit = limit
        self.min_count = min_count  # before it opens a closed breaker
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
    """Closed, open, half open (Nygard, "Release It!", 2007), with a level for each class that may be shed.

        CLOSED     → OPEN        a signal is over its limit: LOW is shed (also NORMAL from twice the limit, also HIGH
                                 from four times)
        OPEN       → OPEN        the period ends and what was seen in it is still over: one class more
        OPEN       → HALF_OPEN   the period ends and it is not: `NUM_PROBES` requests of the best shed class may in
        HALF_OPEN  → OPEN        they are over the limit: one class more, for twice the time
        HALF_OPEN  → CLOSED      they are not, or a period passes without a verdict: one class less; closed at none,
                                 else half open again, for the next class

    CRITICAL is never shed. Every transition forgets what was seen before it. Time passes only in calls.
    """

    def __init__(self, error_rate: float | None, queue_time_s: float | None) -> None:
        self._errors = Signal("error rate", "", error_rate, MIN_ENDS)
        self._queue_time = Signal("queue time", " s", queue_time_s, MIN_STARTS)
        self.state = BreakerState.CLOSED
        self.level = 0  # classes that are shed
        self.num_shed = dict.fromkeys(Priority, 0)
        self._period = PERIOD_S
        self._until = 0.0  # when the present state is judged, unless closed
        self._num_probes = 0
        self._reason = ""

    @property
    def is_enabled(self) -> bool:
        return self._errors.limit is not None or self._queue_time.limit is not None

    def check(self, service_class: Priority, now: float) -> None:
        """Raises `Busy` for a request of a class that is shed. The last of all checks: a probe that passes counts."""
        self._advance(now)
        if self.level == 0 or service_class < _SHED_FROM[self.level - 1]:
            return
        on_trial = self.state is BreakerState.HALF_OPEN and service_class is _SHED_FROM[self.level - 1]
        if on_trial and self._num_probes < NUM_PROBES:
            self._num_probes += 1
            return
        self.num_shed[service_class] += 1
        raise Busy(
            f"overload: requests of class {service_class.name} are refused, {self._reason}",
            retry_after_ms=math.ceil(1e3 * max(self._until - now, 0.05)),
        )

    def observe_end(self, failed: bool, now: float) -> None:
        """An admitted request ended; failed: by an error of ours."""
        if self._errors.limit is not None:
            self._errors.observe(float(failed))
            self._advance(now)

    def observe_queue_time(self, seconds: float, now: float) -> None:
        """A request started, or has waited at the head, for so long."""
        if self._queue_time.limit is not None:
            self._queue_time.observe(seconds)
            self._advance(now)

    def _advance(self, now: float) -> None:
        if self.state is BreakerState.CLOSED:
            excess = self._excess(self._errors.min_count, self._queue_time.min_count)
            if excess >= 1.0:
                self._open(now, 1, excess)
        elif self.state is BreakerState.OPEN:
            self._judge_open(now)
        else:
            self._judge_probes(now)

    def _judge_open(self, now: float) -> None:
        if now < self._until:
            return
        excess = self._excess(1, 1)
        if excess >= 1.0:
            self._open(now, self.level + 1, excess)
        else:
            self._half_open(now)

    def _judge_probes(self, now: float) -> None:
        is_over = now >= self._until
        needed = 1 if is_over else NUM_PROBES
        excess = self._excess(needed, needed)
        if excess >= 1.0:
            self._period = min(2.0 * self._period, MAX_PERIOD_S)
            self._open(now, self.level + 1, excess)
        elif is_over or self._has_verdict():
            self._recover(now)

    def _has_verdict(self) -> bool:
        signals = (self._errors, self._queue_time)
        return all(signal.limit is None or signal.count >= NUM_PROBES for signal in signals)

    def _open(self, now: float, level: int, excess: float) -> None:
        at_once = 1 + (excess >= _WORSE) + (excess >= _WORSE * _WORSE)
        self.level = min(max(level, at_once), len(_SHED_FROM))
        signal = max(self._errors, self._queue_time, key=lambda signal: signal.excess(1))
        self._reason = (
            f"{signal.name} {signal.mean:.3g}{signal.unit} is over its limit of {signal.limit:g}{signal.unit}"
        )
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
        self._errors.forget()
        self._queue_time.forget()

    def _excess(self, min_ends: int, min_starts: int) -> float:
        return max(self._errors.excess(min_ends), self._queue_time.excess(min_starts))
