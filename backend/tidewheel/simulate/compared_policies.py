"""Scaling policies to compare with the served ones."""

import math
from collections.abc import Callable, Mapping

from tidewheel.fleet.scaling import FleetState, ScalingPolicy, ScalingSettings
from tidewheel.fleet.scaling_policies import SCALING_POLICIES, Hysteresis, ReplicaNeed, SlidingMaximum


class QueueDepthScaling:
    """Policy of deploy/kubernetes (HorizontalPodAutoscaler, KEDA): one replica more per 120 s, or less per 300 s."""

    UP_EVERY_S, DOWN_EVERY_S = 120.0, 300.0

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._wanted = SlidingMaximum(settings.scale_down_after_s)
        self._target: int | None = None
        self._raised = self._lowered = -math.inf

    def decide(self, state: FleetState) -> int:
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
        return target


class OngoingRequestScaling:
    """Policy of Ray Serve: a target for a replica's unfinished requests."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._hysteresis = Hysteresis(settings)

    def decide(self, state: FleetState) -> int:
        wanted = math.ceil(state.num_unfinished / self._settings.ongoing_per_replica)
        return self._hysteresis.settle(state, ReplicaNeed(wanted, wanted), self._settings.scale_down_after_s)


POLICIES: Mapping[str, Callable[[ScalingSettings], ScalingPolicy]] = {
    **SCALING_POLICIES,
    "queue-depth": QueueDepthScaling,
    "ongoing": OngoingRequestScaling,
}
