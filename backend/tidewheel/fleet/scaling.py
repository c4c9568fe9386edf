"""Number of replicas: what a policy sees, what it answers, and its settings.

Policies are pure: the clock is an argument and a decision is a value. The simulator and the cluster fill the same
`FleetState`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tidewheel.errors import ConfigError
from tidewheel.request import Priority

MAX_REPLICAS = 10_000
_QUEUE_LIMITS = {Priority.CRITICAL: 0.5, Priority.HIGH: 1.0, Priority.NORMAL: 2.0, Priority.LOW: 60.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """Report of one ready replica."""

    name: str
    waiting: int = 0  # requests that have not started
    running: int = 0
    cache_usage: float = 0.0  # share of its cache's blocks that requests hold
    tokens_per_s: float = 0.0  # computed tokens of prompts and outputs, since the last report
    queue_s: Mapping[Priority, float] = field(default_factory=dict)  # age of the oldest waiting request by class


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """All replicas at a moment. Draining ones are left out: they take no request."""

    now: float  # seconds, never falls
    ready: tuple[ReplicaReport, ...] = ()
    num_starting: int = 0
    num_arrivals: int = 0  # requests since some start; never falls
    num_held: int = 0  # requests that no replica has: all wait for the first one

    @property
    def num_replicas(self) -> int:
        return len(self.ready) + self.num_starting

    @property
    def num_waiting(self) -> int:
        return self.num_held + sum(replica.waiting for replica in self.ready)

    @property
    def num_running(self) -> int:
        return sum(replica.running for replica in self.ready)

    @property
    def num_unfinished(self) -> int:
        return self.num_waiting + self.num_running


class Decision(NamedTuple):
    num_replicas: int  # ready and starting ones
    reason: str


class ScalingPolicy(Protocol):
    def decide(self, state: FleetState) -> Decision:
        """Return the wanted number of replicas; called again and again, with a rising clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """Bounds and thresholds; raise `ConfigError` naming the field."""

    min_replicas: int = 1  # 0: none while nothing is asked
    max_replicas: int = 4
    startup_s: float = 120.0  # from the decision to a ready replica
    utilisation: float = 0.7  # share of a replica's capacity that is planned with
    release_utilisation: float = 0.55  # share that fewer replicas may reach
    scale_down_after_s: float = 600.0  # for so long fewer must have been enough
    cool_down_s: float = 60.0  # between a change and a scale-down
    idle_to_zero_s: float = 600.0  # without any request
    waiting_per_replica: int = 8
    ongoing_per_replica: int = 2  # of the rule `ongoing`; Ray Serve's default
    cache_usage: float = 0.8  # of a replica
    max_num_seqs: int = 256  # requests that run in one replica
    replica_tokens_per_s: float = 0.0  # capacity; 0: learned from replicas whose requests wait
    queue_limit_s: Mapping[Priority, float] = field(default_factory=lambda: dict(_QUEUE_LIMITS))

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise ConfigError(fault)

    def _faults(self) -> Iterator[str]:
        least = max(self.min_replicas, 1)
        if not 0 <= self.min_replicas <= MAX_REPLICAS:
            yield f"min_replicas is {self.min_replicas}: it must be 0 to {MAX_REPLICAS}"
        if not least <= self.max_replicas <= MAX_REPLICAS:
            yield f"max_replicas is {self.max_replicas}: it must be {least} to {MAX_REPLICAS}, min_replicas at least"
        for name in ("utilisation", "cache_usage"):
            if not 0 < getattr(self, name) <= 1:
                yield f"{name} is {getattr(self, name):g}: it must be above 0 and at most 1"
        if not 0 < self.release_utilisation <= self.utilisation:
            limit = f"utilisation, {self.utilisation:g}"
            yield f"release_utilisation is {self.release_utilisation:g}: it must be above 0 and at most {limit}"
        yield from self._faults_of_numbers()

    def _faults_of_numbers(self) -> Iterator[str]:
        for name in ("startup_s", "scale_down_after_s", "cool_down_s", "idle_to_zero_s", "replica_tokens_per_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                yield f"{name} is {value:g}: it must be 0 or more"
        for name in ("waiting_per_replica", "ongoing_per_replica", "max_num_seqs"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}: it must be at least 1"
        for service_class, limit in self.queue_limit_s.items():
            if not limit > 0:
                yield f"queue_limit_s of {service_class.name} is {limit:g}: it must be above 0"

    def clamp(self, num_replicas: int) -> int:
        return min(max(num_replicas, self.min_replicas), self.max_replicas)
