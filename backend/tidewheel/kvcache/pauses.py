"""Pauses of sessions while tools run, and how long they are expected to last."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple, TypeVar

T = TypeVar("T")

MAX_TOOLS = 4096  # durations that are remembered, of all tenants; the least recently used is forgotten
MAX_RUNNING = 16_384  # pauses that are measured at once
_LEAST_WEIGHT = 1 / 32  # of a new duration
_LEAST_SPREAD = 0.25
_LEAST_S = 1e-3
_NORMAL = NormalDist()
_LOWER_QUARTILE = _NORMAL.inv_cdf(0.25)


class Duration(NamedTuple):
    """Lognormal distribution of seconds."""

    log_mean: float = 0.0
    log_spread: float = 2.0
    num_seen: int = 0

    @property
    def median(self) -> float:
        return math.exp(self.log_mean)

    def seconds_left(self, elapsed: float) -> float:
        """Return the median of the seconds left after `elapsed`. Above the quantile of 99.9 %, it is `elapsed`."""
        if elapsed < _LEAST_S:
            return self.median
        passed = _NORMAL.cdf((math.log(elapsed) - self.log_mean) / self.log_spread)
        if passed > 0.999:
            return elapsed
        return math.exp(self.log_mean + self.log_spread * _NORMAL.inv_cdf((1.0 + passed) / 2.0)) - elapsed

    def with_seen(self, seconds: float) -> "Duration":
        """Return the distribution after another duration, which weighs as much as each of the first ones, or 1/32."""
        weight = max(1.0 / (self.num_seen + 1), _LEAST_WEIGHT)
        error = math.log(max(seconds, _LEAST_S)) - self.log_mean
        variance = (1.0 - weight) * (self.log_spread**2 + weight * error**2) if self.num_seen else self.log_spread**2
        return Duration(self.log_mean + weight * error, max(math.sqrt(variance), _LEAST_SPREAD), self.num_seen + 1)


class Pause(NamedTuple):
    """Time from a turn's end to the arrival of the session's next turn."""

    began: float
    duration: Duration

    @property
    def due(self) -> float:
        """Return the time by which a quarter of such pauses have ended."""
        return self.began + math.exp(self.duration.log_mean + _LOWER_QUARTILE * self.duration.log_spread)

    def seconds_left(self, now: float) -> float:
        return self.duration.seconds_left(now - self.began)


class ToolDurations:
    """Durations by tenant and tool, learned from the pauses of sessions. An unseen tool has the tenant's mean."""

    def __init__(self) -> None:
        self._durations: OrderedDict[tuple[str, str], Duration] = OrderedDict()  # least recently used first
        self._running: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()  # tool and start by session

    def begin(self, tenant: str, session_id: str, tools: Sequence[str], began: float) -> Pause:
        """Return the pause while tools run side by side: that of the slowest."""
        durations = {tool: self._of(tenant, tool) for tool in tools}
        slowest = max(durations, key=lambda tool: durations[tool].log_mean)
        _put(self._running, (tenant, session_id), (slowest, began), MAX_RUNNING)
        return Pause(began, durations[slowest])

    def end(self, tenant: str, session_id: str, now: float) -> None:
        """Learn from the end of a session's pause; ignore unknown ones."""
        tool, began = self._running.pop((tenant, session_id), ("", now))
        if tool:
            for name in (tool, ""):
                _put(self._durations, (tenant, name), self._of(tenant, name).with_seen(now - began), MAX_TOOLS)

    def forget(self, tenant: str, session_id: str) -> None:
        """End a session's pause without learning from it."""
        self._running.pop((tenant, session_id), None)

    def _of(self, tenant: str, tool: str) -> Duration:
        known = self._durations.get((tenant, tool))
        return known or self._durations.get((tenant, ""), Duration())._replace(num_seen=0)


def _put(table: OrderedDict[tuple[str, str], T], key: tuple[str, str], value: T, limit: int) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > limit:
        table.popitem(last=False)
