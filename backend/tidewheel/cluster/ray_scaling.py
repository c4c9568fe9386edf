"""Number of replicas in Ray Serve, by the project's own policies.

Ray Serve makes one in its controller, and calls it again and again with what replicas report. Its own counts of
requests are of no use: it does not see requests that the gateway sends, but for those that wait for a replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tidewheel.cluster.replica_figures import queue_s
from tidewheel.fleet.scaling import FleetState, ReplicaReport, ScalingSettings
from tidewheel.fleet.scaling_policies import make_scaling


class _Seen(NamedTuple):
    """Counters of a replica at a report, and its rate since the report before."""

    time: float
    arrivals: float
    tokens: float
    tokens_per_s: float = 0.0


class RayScaling:
    def __init__(self, policy: str, settings: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        """Raise `ConfigError` for an unknown policy, or settings out of range."""
        self._policy = make_scaling(policy, ScalingSettings(**settings))
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._num_arrivals = 0.0

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number, and no state for Ray to keep."""
        return self._policy.decide(self._state(context)).num_replicas, {}

    def _state(self, context: Any) -> FleetState:
        """Read a context of Ray Serve."""
        figures: Mapping[str, Mapping[Any, Any]] = context.raw_metrics or {}
        names = {replica: replica.unique_id for replica in context.running_replicas}
        self._seen = {name: seen for name, seen in self._seen.items() if name in names.values()}
        ready = tuple(self._report(name, _latest(figures, replica)) for replica, name in names.items())
        return FleetState(
            now=self._clock(),
            ready=ready,
            num_starting=max(context.target_num_replicas - len(ready), 0),
            num_arrivals=int(self._num_arrivals),
            num_held=int(context.total_queued_requests or 0),
        )

    def _report(self, name: str, latest: Mapping[str, tuple[float, float]]) -> ReplicaReport:
        if latest:
            self._note(name, latest)
        seen = self._seen.get(name)
        return ReplicaReport(
            name=name,
            waiting=int(_value(latest, "waiting")),
            running=int(_value(latest, "running")),
            cache_usage=min(_value(latest, "kv_use"), 1.0),
            tokens_per_s=0.0 if seen is None else seen.tokens_per_s,
            queue_s=queue_s({name: value for name, (_, value) in latest.items()}),
        )

    def _note(self, name: str, latest: Mapping[str, tuple[float, float]]) -> None:
        """Take in a report that is new. Counters of a server that was started again begin at zero."""
        when = max(moment for moment, _ in latest.values())
        arrivals, tokens = _value(latest, "arrivals"), _value(latest, "tokens")
        before = self._seen.get(name)
        if before is None:
            self._seen[name] = _Seen(when, arrivals, tokens)
        elif when > before.time:
            self._num_arrivals += _growth(before.arrivals, arrivals)
            rate = _growth(before.tokens, tokens) / (when - before.time)
            self._seen[name] = _Seen(when, arrivals, tokens, rate)


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now


def _value(latest: Mapping[str, tuple[float, float]], name: str) -> float:
    return latest[name][1] if name in latest else 0.0


def _latest(figures: Mapping[str, Mapping[Any, Any]], replica: object) -> dict[str, tuple[float, float]]:
    """Return time and value of the last report of each figure."""
    series = {name: by_replica.get(replica) for name, by_replica in figures.items()}
    return {name: (one[-1].timestamp, one[-1].value) for name, one in series.items() if one}
