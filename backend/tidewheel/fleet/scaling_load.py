"""Work that is asked of a fleet, and the work that one replica can do, both in tokens per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidewheel.fleet.scaling import FleetState, ReplicaReport, ScalingSettings
from tidewheel.request import Priority

FAST_S, SLOW_S = 60.0, 1800.0  # time constants of averages of work
FIRM_REPORTS = 5
RISE_S, FALL_S = 60.0, 3600.0  # and of the capacity: a replica that did more can do more


class Smoothed:
    """Average whose weights fall exponentially with age; the first value counts in full."""

    def __init__(self, time_constant_s: float, fall_s: float | None = None) -> None:
        """`fall_s`: another time constant, for values below the average."""
        self._rise_s = time_constant_s
        self._fall_s = fall_s or time_constant_s
        self.value: float | None = None

    def add(self, value: float, seconds: float) -> float:
        """Add what was the mean over the last `seconds`."""
        if self.value is None:
            self.value = value
        else:
            constant = self._rise_s if value > self.value else self._fall_s
            self.value += -math.expm1(-seconds / constant) * (value - self.value)
        return self.value


@dataclass(frozen=True, slots=True)
class Work:
    tokens_per_s: float  # asked for now
    tokens_per_request: float  # 0: unknown
    replica_tokens_per_s: float  # capacity; 0: unknown
    is_firm: bool  # known well enough to ask for replicas


class WorkMeter:
    """Estimates from successive states.

    Tokens computed fall short of those asked for while requests wait. So the work is the larger one of the computed
    tokens and the arrivals times the tokens of a request, measured while nothing waited for long.
    A replica's capacity is what it computes while it is full.
    """

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._last: FleetState | None = None
        self._arrivals, self._slow_arrivals = Smoothed(FAST_S), Smoothed(SLOW_S)
        self._tokens, self._slow_tokens = Smoothed(FAST_S), Smoothed(SLOW_S)
        self._capacity = Smoothed(RISE_S, FALL_S)
        self._num_full = 0  # reports of full replicas

    def observe(self, state: FleetState) -> Work:
        """Return the estimates as of this state; raise `ValueError` if the clock went back."""
        last, self._last = self._last, state
        seconds = 0.0 if last is None else state.now - last.now
        if seconds < 0:
            raise ValueError(f"the clock went back by {-seconds:g} s")
        if last is None or seconds == 0:
            return self._work()
        arrivals = max(state.num_arrivals - last.num_arrivals, 0) / seconds
        tokens = sum(replica.tokens_per_s for replica in state.ready)
        tokens_per_request = self._tokens_per_request  # of before, so that more arrivals never mean less work
        self._arrivals.add(arrivals, seconds)
        self._tokens.add(tokens, seconds)
        if state.num_waiting == 0 or not tokens_per_request:
            self._slow_arrivals.add(arrivals, seconds)
            self._slow_tokens.add(tokens, seconds)
        self._learn_capacity(last.ready, state.ready, seconds)
        return self._work(tokens_per_request)

    @property
    def _tokens_per_request(self) -> float:
        arrivals, tokens = self._slow_arrivals.value, self._slow_tokens.value
        return tokens / arrivals if arrivals and tokens else 0.0

    def _work(self, tokens_per_request: float | None = None) -> Work:
        known = self._tokens_per_request if tokens_per_request is None else tokens_per_request
        asked = max(self._tokens.value or 0.0, known * (self._arrivals.value or 0.0))
        if self._settings.replica_tokens_per_s:
            return Work(asked, known, self._settings.replica_tokens_per_s, is_firm=True)
        return Work(asked, known, self._capacity.value or 0.0, is_firm=self._num_full >= FIRM_REPORTS)

    def _learn_capacity(self, before: Sequence[ReplicaReport], now: Sequence[ReplicaReport], seconds: float) -> None:
        """A replica that became full may have been idle before, so that its rate is only a lower bound."""
        were_full = {replica.name for replica in before if is_full(self._settings, replica)}
        known = self._capacity.value
        for replica in now:
            full, rate = is_full(self._settings, replica), replica.tokens_per_s
            self._num_full += full
            is_more = known is not None and rate > known
            if is_more or (full and (known is None or replica.name in were_full)):
                self._capacity.add(rate, seconds)


def is_full(settings: ScalingSettings, replica: ReplicaReport) -> bool:
    return replica.waiting >= settings.waiting_per_replica or late_class(settings, replica) is not None


def late_class(settings: ScalingSettings, replica: ReplicaReport) -> Priority | None:
    """Return the best class whose oldest request waits longer than `queue_limit_s`."""
    limits = settings.queue_limit_s
    return min((name for name, age in replica.queue_s.items() if age > limits.get(name, math.inf)), default=None)
