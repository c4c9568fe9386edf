"""Common rules to compare with, and the names of all policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tidewheel.errors import ConfigError
from tidewheel.fleet.arrival_forecast import ForecastSettings, bucket_counts
from tidewheel.fleet.scaling import Decision, FleetState, ScalingPolicy, ScalingSettings
from tidewheel.fleet.scaling_predictive import Predictive
from tidewheel.fleet.scaling_reactive import Largest, Need, Reactive, Steady


class Constant:
    """Keep `max_replicas`."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._num_replicas = settings.max_replicas

    def decide(self, state: FleetState) -> Decision:  # noqa: ARG002
        return Decision(self._num_replicas, "constant")


class QueueDepth:
    """Rule of deploy/kubernetes, for the HorizontalPodAutoscaler and KEDA: waiting requests, and the cache in use.

    One replica comes every 120 s, and one goes every 300 s.
    """

    UP_EVERY_S, DOWN_EVERY_S = 120.0, 300.0

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._wanted = Largest(settings.scale_down_after_s)
        self._target: int | None = None
        self._raised = self._lowered = -math.inf

    def decide(self, state: FleetState) -> Decision:
        settings = self._settings
        usage = sum(replica.cache_usage for replica in state.ready)
        wanted = math.ceil(max(state.num_waiting / settings.waiting_per_replica, usage / settings.cache_usage))
        most = settings.clamp(self._wanted.add(state.now, wanted, settings.scale_down_after_s))
        target = settings.clamp(state.num_replicas) if self._target is None else self._target
        if settings.clamp(wanted) > target and state.now - self._raised >= self.UP_EVERY_S:
            target, self._raised = target + 1, state.now
        elif most < target and state.now - max(self._raised, self._lowered) >= self.DOWN_EVERY_S:
            target, self._lowered = target - 1, state.now
        self._target = target
        return Decision(target, f"{state.num_waiting} requests wait, {usage:.2f} caches are in use")


class Ongoing:
    """Rule of Ray Serve: a target for the requests of a replica, waiting ones included."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._steady = Steady(settings)

    def decide(self, state: FleetState) -> Decision:
        wanted = math.ceil(state.num_unfinished / self._settings.ongoing_per_replica)
        need = Need(wanted, wanted, f"{state.num_unfinished} unfinished requests")
        return self._steady.settle(state, need, self._settings.scale_down_after_s)


SCALING_POLICIES: Mapping[str, Callable[[ScalingSettings], ScalingPolicy]] = MappingProxyType(
    {
        "reactive": Reactive,
        "predictive": Predictive,
        "queue-depth": QueueDepth,
        "ongoing": Ongoing,
        "constant": Constant,
    }
)


def check_scaling(name: str) -> None:
    """Raise `ConfigError` for an unknown name."""
    if name not in SCALING_POLICIES:
        raise ConfigError(f"scaling is {name!r}: choose one of {', '.join(SCALING_POLICIES)}")


def make_scaling(name: str, settings: ScalingSettings, history: Sequence[float] = ()) -> ScalingPolicy:
    """Return a policy. `history`: times of arrivals of the days before, for `predictive`. Raise `ConfigError`."""
    check_scaling(name)
    if name == "predictive":
        forecast = ForecastSettings()
        return Predictive(settings, forecast, bucket_counts(history, forecast))
    return SCALING_POLICIES[name](settings)
