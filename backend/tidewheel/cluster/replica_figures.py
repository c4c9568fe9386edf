"""Figures of a replica, from the metrics of its server, as routers, scaling policies and the status read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from tidewheel import metrics
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
    """Return sums over all models of a page in Prometheus' format, and the longest wait of each class."""
    figures = dict.fromkeys((*_SUMS.values(), *_QUEUES), 0.0)
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _SUMS:
            figures[_SUMS[name]] += _value(line)
        elif name == _OLDEST and (found := _CLASS.search(line)):
            key = f"queue_s_{found[1]}"
            figures[key] = max(figures[key], _value(line))
    return figures


def queue_s(figures: Mapping[str, float]) -> dict[Priority, float]:
    """Return the age of the oldest waiting request of each class."""
    return {priority: figures.get(name, 0.0) for name, priority in _QUEUES.items()}


def _value(line: str) -> float:
    return float(line.rpartition(" ")[2])
