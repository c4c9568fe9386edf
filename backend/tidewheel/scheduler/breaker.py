import enum
import math
from dataclasses import dataclass

from tidewheel.errors import Busy
from tidewheel.request import Priority

PERIOD_S = 5.0  # before a state is judged
MAX_PERIOD_S = 60.0
NUM_PROBES = 5
MIN_ENDS = 20  # before errors count
MIN_STARTS = 5  # before queue times count
WINDOW = 50  # observations per mean

_MAX_LEVEL = 3
_WORSE = 2.0


class BreakerState(enum.IntEnum):
    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(slots=True)
class LoadSignal:
    """Mean that fades by observation, not time: failures of slow traffic count."""

    name: str
    unit: str
    limit: float | None
    mean: float = 0.0
    count: int = 0

    def observe(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / min(self.count, WINDOW)

    def excess(self, min_count: int) -> float:
        """Return mean / limit; 0 without a limit, or before `min_count` observations."""
        return self.mean / self.limit if self.limit is not None and self.count >= min_count else 0.0


class CircuitBreaker:
    """Circuit breaker that sheds the `level` lowest classes (Nygard, "Release It!", 2007).

        CLOSED     → OPEN        over the limit: shed LOW; at twice the limit also NORMAL, at four times HIGH
        OPEN       → OPEN        over the limit again: shed one more class
        OPEN       → HALF_OPEN   within the limit for a period: admit `NUM_PROBES` of the best shed class
        HALF_OPEN  → OPEN        probes over the limit: shed the same classes for twice the time
        HALF_OPEN  → CLOSED      probes within the limit, or the period ends: shed one class less, until none

    A level counts the queue times of the classes that it admits.
    """

    def __init__(self, error_rate: float | None, queue_time_s: float | None) -> None:
        self._errors = LoadSignal("error rate", "", error_rate)
        self._queue_times = [LoadSignal("queue time", " s", queue_time_s) for _ in Priority]
        self.state = BreakerState.CLOSED
        self.level = 0
        self.num_shed = [0] * len(Priority)
        self._period = PERIOD_S
        self._until = 0.0  # end of the period
        self._num_probes = 0
        self._reason = ""

    def check(self, service_class: Priority, now: float) -> None:
        """Raise `Busy` if the class is shed. Call after all other checks: a probe counts as admitted."""
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
        if self._errors.limit is not None:
            self._errors.observe(float(failed))
            self._advance(now)

    def observe_queue_time(self, seconds: float, service_class: Priority, now: float) -> None:
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
        return max(self._errors.excess(min_ends), self._queue_times[level].excess(min_starts))


def _best_shed(level: int) -> int:
    return Priority.LOW + 1 - level
