"""Scaling by the project's policies.

Ray's own request counts are useless: only calls that wait for the first replica go through Ray.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tidewheel import metrics
from tidewheel.fleet.scaling import FleetState, ReplicaReport, ScalingSettings
from tidewheel.fleet.scaling_policies import make_scaling
from tidewheel.request import Priority

_SUMS = {
    metrics.RUNNING.name: "running",
    metrics.WAITING.name: "waiting",
    metrics.KV_USAGE.name: "kv_use",
    metrics.TENANT_REQUESTS.name: "arrivals",
    metrics.SCHEDULED_TOKENS.name: "tokens",
    metrics.ENGINE_RESTARTS.name: "engine_restarts",
}
_OLDEST = metrics.OLDEST_WAIT.name
_CLASS = re.compile(r'[{,]class="(\w+)"')
_QUEUES: Mapping[str, Priority] = MappingProxyType({f"queue_s_{one.name.lower()}": one for one in Priority})


def figures_of(page: str) -> dict[str, float]:
    """Return sums over models, and each class's longest wait in seconds."""
    figures = dict.fromkeys((*_SUMS.values(), *_QUEUES), 0.0)
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _SUMS:
            figures[_SUMS[name]] += _number(line)
        elif name == _OLDEST and (found := _CLASS.search(line)):
            key = f"queue_s_{found[1]}"
            figures[key] = max(figures[key], _number(line))
    return figures


def queue_s(figures: Mapping[str, float]) -> dict[Priority, float]:
    return {priority: figures.get(name, 0.0) for name, priority in _QUEUES.items()}


def _number(line: str) -> float:
    return float(line.rpartition(" ")[2])


class _Counters(NamedTuple):
    time: float
    arrivals: float
    tokens: float
    tokens_per_s: float = 0.0


class RayScaling:
    """Policy that Ray Serve's controller calls."""

    def __init__(self, policy: str, settings: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        """Raise `ConfigError` for a wrong policy or setting."""
        self._policy = make_scaling(policy, ScalingSettings(**settings))
        self._clock = clock
        self._counters: dict[str, _Counters] = {}  # by replica
        self._num_arrivals = 0.0

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number. `context`: Ray's `AutoscalingContext`."""
        return self._policy.decide(self._state(context)).num_replicas, {}

    def _state(self, context: Any) -> FleetState:
        figures: Mapping[str, Mapping[Any, Any]] = context.raw_metrics or {}
        names = {replica: replica.unique_id for replica in context.running_replicas}
        self._counters = {name: one for name, one in self._counters.items() if name in names.values()}
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
            self._count(name, latest)
        counters = self._counters.get(name)
        return ReplicaReport(
            name=name,
            waiting=int(_value(latest, "waiting")),
            running=int(_value(latest, "running")),
            cache_usage=min(_value(latest, "kv_use"), 1.0),
            tokens_per_s=0.0 if counters is None else counters.tokens_per_s,
            queue_s=queue_s({name: value for name, (_, value) in latest.items()}),
        )

    def _count(self, name: str, latest: Mapping[str, tuple[float, float]]) -> None:
        """Counters of a restarted server begin at zero."""
        when = max(moment for moment, _ in latest.values())
        arrivals, tokens = _value(latest, "arrivals"), _value(latest, "tokens")
        before = self._counters.get(name)
        if before is None:
            self._counters[name] = _Counters(when, arrivals, tokens)
        elif when > before.time:
            self._num_arrivals += _growth(before.arrivals, arrivals)
            rate = _growth(before.tokens, tokens) / (when - before.time)
            self._counters[name] = _Counters(when, arrivals, tokens, rate)


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now


def _value(latest: Mapping[str, tuple[float, float]], name: str) -> float:
    return latest[name][1] if name in latest else 0.0


def _latest(figures: Mapping[str, Mapping[Any, Any]], replica: object) -> dict[str, tuple[float, float]]:
    series = {name: by_replica.get(replica) for name, by_replica in figures.items()}
    return {name: (one[-1].timestamp, one[-1].value) for name, one in series.items() if one}
