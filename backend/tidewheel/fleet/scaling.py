import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidewheel.errors import ConfigError
from tidewheel.request import Priority

MAX_REPLICAS = 10_000
FAST_S, SLOW_S = 60.0, 1800.0  # time constants of the work's averages
FIRM_REPORTS = 5  # of full replicas, until the capacity is trusted
RISE_S, FALL_S = 60.0, 3600.0  # time constants of the capacity: a reached rate stays possible
QUEUE_LIMITS_S = {Priority.CRITICAL: 0.5, Priority.HIGH: 1.0, Priority.NORMAL: 2.0, Priority.LOW: 60.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    name: str
    waiting: int = 0  # requests
    running: int = 0
    cache_usage: float = 0.0  # share of KV blocks held by requests
    tokens_per_s: float = 0.0  # computed, since the last report
    queue_s: Mapping[Priority, float] = field(default_factory=dict)  # age of each class's oldest waiting request


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """State of all replicas, except draining ones."""

    now: float  # seconds, never falls
    ready: tuple[ReplicaReport, ...] = ()
    num_starting: int = 0
    num_arrivals: int = 0  # never falls
    num_held: int = 0  # requests that wait for the first replica

    @property
    def num_replicas(self) -> int:
        return len(self.ready) + self.num_starting

    @property
    def num_waiting(self) -> int:
        return self.num_held + sum(replica.waiting for replica in self.ready)

    @property
    def num_unfinished(self) -> int:
        return self.num_waiting + sum(replica.running for replica in self.ready)


class ScalingPolicy(Protocol):
    def decide(self, state: FleetState) -> int:
        """Return the wanted number of ready and starting replicas. Called repeatedly, with a rising clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """Settings of autoscaling. Raise `ConfigError` naming the field."""

    min_replicas: int = 1  # 0: none without requests
    max_replicas: int = 4
    startup_s: float = 120.0  # from decision to ready replica
    utilisation: float = 0.7  # planned share of the capacity
    release_utilisation: float = 0.55  # share that fewer replicas may reach
    scale_down_after_s: float = 600.0  # that fewer must have sufficed
    cool_down_s: float = 60.0  # between a change and a scale-down
    idle_to_zero_s: float = 600.0
    waiting_per_replica: int = 8
    ongoing_per_replica: int = 2  # of the simulator's `ongoing`; Ray Serve's default
    cache_usage: float = 0.8
    max_num_seqs: int = 256
    replica_tokens_per_s: float = 0.0  # capacity; 0: learned from full replicas

    def __post_init__(self) -> None:
        for name, holds, rule in self._rules():
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name):g}: it must be {rule}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        least = max(self.min_replicas, 1)
        yield "min_replicas", 0 <= self.min_replicas <= MAX_REPLICAS, f"0 to {MAX_REPLICAS}"
        limit = f"{least} to {MAX_REPLICAS}, min_replicas at least"
        yield "max_replicas", least <= self.max_replicas <= MAX_REPLICAS, limit
        for name in ("utilisation", "cache_usage"):
            yield name, 0 < getattr(self, name) <= 1, "above 0 and at most 1"
        limit = f"above 0 and at most utilisation, {self.utilisation:g}"
        yield "release_utilisation", 0 < self.release_utilisation <= self.utilisation, limit
        for name in ("startup_s", "scale_down_after_s", "cool_down_s", "idle_to_zero_s", "replica_tokens_per_s"):
            yield name, 0 <= getattr(self, name) < math.inf, "0 or more"
        for name in ("waiting_per_replica", "ongoing_per_replica", "max_num_seqs"):
            yield name, getattr(self, name) >= 1, "at least 1"

    def clamp(self, num_replicas: int) -> int:
        return min(max(num_replicas, self.min_replicas), self.max_replicas)


@dataclass(slots=True)
class ExponentialAverage:
    rise_s: float  # time constant for values above the average
    fall_s: float  # likewise below
    value: float | None = None

    def add(self, value: float, seconds: float) -> None:
        if self.value is None:
            self.value = value
        else:
            constant = self.rise_s if value > self.value else self.fall_s
            self.value += -math.expm1(-seconds / constant) * (value - self.value)


class WorkMeter:
    """Estimates of the fleet's work and a replica's capacity, in tokens/s, from successive states.

    Work is the larger of the rate of computed tokens, and arrivals times the mean tokens of a request, measured while
    no request waits. Capacity is the rate of a full replica.
    """

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._last: FleetState | None = None
        self._arrivals, self._tokens = (ExponentialAverage(FAST_S, FAST_S) for _ in range(2))
        self._slow_arrivals, self._slow_tokens = (ExponentialAverage(SLOW_S, SLOW_S) for _ in range(2))
        self._capacity = ExponentialAverage(RISE_S, FALL_S)
        self._num_full = 0
        self.tokens_per_request = 0.0  # before the last state, so that more arrivals never mean less work; 0: unknown

    @property
    def tokens_per_s(self) -> float:
        return max(self._tokens.value or 0.0, self.tokens_per_request * (self._arrivals.value or 0.0))

    @property
    def replica_tokens_per_s(self) -> float:
        """Return the capacity of a replica; 0: unknown."""
        return self._settings.replica_tokens_per_s or self._capacity.value or 0.0

    @property
    def is_firm(self) -> bool:
        """Return whether the capacity is known well enough to ask for replicas."""
        return self._settings.replica_tokens_per_s > 0 or self._num_full >= FIRM_REPORTS

    def observe(self, state: FleetState) -> None:
        last, self._last = self._last, state
        slow_arrivals, slow_tokens = self._slow_arrivals.value, self._slow_tokens.value
        self.tokens_per_request = slow_tokens / slow_arrivals if slow_arrivals and slow_tokens else 0.0
        if last is None or (seconds := state.now - last.now) == 0:
            return
        arrivals = max(state.num_arrivals - last.num_arrivals, 0) / seconds
        tokens = sum(replica.tokens_per_s for replica in state.ready)
        self._arrivals.add(arrivals, seconds)
        self._tokens.add(tokens, seconds)
        if state.num_waiting == 0 or not self.tokens_per_request:
            self._slow_arrivals.add(arrivals, seconds)
            self._slow_tokens.add(tokens, seconds)
        self._learn_capacity(last.ready, state.ready, seconds)

    def _learn_capacity(self, before: Sequence[ReplicaReport], now: Sequence[ReplicaReport], seconds: float) -> None:
        were_full = {replica.name for replica in before if is_full(self._settings, replica)}
        known = self._capacity.value
        for replica in now:
            full, rate = is_full(self._settings, replica), replica.tokens_per_s
            self._num_full += full
            is_more = known is not None and rate > known
            if is_more or (full and (known is None or replica.name in were_full)):
                self._capacity.add(rate, seconds)


def is_full(settings: ScalingSettings, replica: ReplicaReport) -> bool:
    return replica.waiting >= settings.waiting_per_replica or is_late(replica)


def is_late(replica: ReplicaReport) -> bool:
    return any(age > QUEUE_LIMITS_S[service_class] for service_class, age in replica.queue_s.items())
