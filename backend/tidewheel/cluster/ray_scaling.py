"""Ray Serve autoscaling by the project's policies.

Ray counts only the gateway's calls that wait for a first replica: clients' requests bypass Ray.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tidewheel import metrics
from tidewheel.fleet.scaling import FleetState, ReplicaReport, ScalingSettings
from tidewheel.fleet.scaling_policies import SCALING_POLICIES
from tidewheel.request import Priority

_SUMS = {
    metrics.RUNNING.name: "running",
    metrics.WAITING.name: "waiting",
    metrics.KV_USAGE.name: "kv_use",
    metrics.TENANT_REQUESTS.name: "arrivals",
    metrics.SCHEDULED_TOKENS.name: "tokens",
    metrics.ENGINE_RESTARTS.name: "engine_restarts",
}
_QUEUES = {f"queue_s_{one.name.lower()}": one for one in Priority}


def figures_of(page: str) -> dict[str, float]:
    """Return a replica's metrics summed over models, and each class's longest wait (s). Raise `ValueError`."""
    from tidewheel_client.server_pages import Figures  # slow, and only replicas need it

    shown = Figures.parse(page)
    sums = {figure: sum(one.value for one in shown.samples(name)) for name, figure in _SUMS.items()}
    for name, priority in _QUEUES.items():
        waits = shown.samples(metrics.OLDEST_WAIT.name, **{"class": priority.name.lower()})
        sums[name] = max((one.value for one in waits), default=0.0)
    return sums


def queue_s(figures: Mapping[str, float]) -> dict[Priority, float]:
    return {priority: figures.get(name, 0.0) for name, priority in _QUEUES.items()}


class _Counters(NamedTuple):
    time: float
    arrivals: float
    tokens: float
    tokens_per_s: float = 0.0


class RayScaling:
    def __init__(self, policy: str, settings: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        """Raise `ConfigError` for a wrong setting."""
        self._policy = SCALING_POLICIES[policy](ScalingSettings(**settings))
        self._clock = clock
        self._counters: dict[str, _Counters] = {}  # by replica
        self._num_arrivals = 0.0

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas. `context`: Ray's `AutoscalingContext`."""
        figures: Mapping[str, Mapping[Any, Any]] = context.raw_metrics or {}
        present = {replica.unique_id for replica in context.running_replicas}
        self._counters = {name: one for name, one in self._counters.items() if name in present}
        ready = tuple(self._report(replica, figures) for replica in context.running_replicas)
        state = FleetState(
            now=self._clock(),
            ready=ready,
            num_starting=max(context.target_num_replicas - len(ready), 0),
            num_arrivals=int(self._num_arrivals),
            num_held=int(context.total_queued_requests or 0),
        )
        return self._policy.decide(state), {}

    def _report(self, replica: Any, figures: Mapping[str, Mapping[Any, Any]]) -> ReplicaReport:
        latest = {name: series[replica][-1] for name, series in figures.items() if series.get(replica)}
        values = defaultdict(float, {name: float(one.value) for name, one in latest.items()})
        if latest:
            self._count(replica.unique_id, max(one.timestamp for one in latest.values()), values)
        counters = self._counters.get(replica.unique_id)
        return ReplicaReport(
            name=replica.unique_id,
            waiting=int(values["waiting"]),
            running=int(values["running"]),
            cache_usage=min(values["kv_use"], 1.0),
            tokens_per_s=0.0 if counters is None else counters.tokens_per_s,
            queue_s=queue_s(values),
        )

    def _count(self, name: str, when: float, values: Mapping[str, float]) -> None:
        arrivals, tokens = values["arrivals"], values["tokens"]
        before = self._counters.get(name)
        if before is None:
            self._counters[name] = _Counters(when, arrivals, tokens)
        elif when > before.time:
            self._num_arrivals += _growth(before.arrivals, arrivals)
            rate = _growth(before.tokens, tokens) / (when - before.time)
            self._counters[name] = _Counters(when, arrivals, tokens, rate)


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now
