from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tidewheel.errors import ConfigError
from tidewheel.fleet.arrival_forecast import ArrivalBuckets, ArrivalForecast, ForecastSettings, bucket_counts
from tidewheel.fleet.scaling import (
    Decision,
    FleetState,
    FleetWork,
    ScalingPolicy,
    ScalingSettings,
    WorkMeter,
    late_class,
)

_SLACK = 1e-9  # so that rounding asks for no replica
_KEPT_QUEUE = 0.25  # share of `waiting_per_replica` that keeps all replicas


class ReplicaNeed(NamedTuple):
    """Range of sufficient replica counts: within `least` to `most` the fleet stays."""

    least: int
    most: int
    reason: str  # of `least`


class ReactiveScaling:
    """Policy that scales up to the current need at once, and down to the largest recent need."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._meter = WorkMeter(settings)
        self._hysteresis = Hysteresis(settings)

    def decide(self, state: FleetState) -> Decision:
        need = current_need(self._settings, state, self._meter.observe(state))
        return self._hysteresis.settle(state, need, self._settings.scale_down_after_s)


def current_need(settings: ScalingSettings, state: FleetState, work: FleetWork) -> ReplicaNeed:
    usage = sum(replica.cache_usage for replica in state.ready)
    kept_usage = settings.cache_usage * settings.release_utilisation / settings.utilisation
    by_rows = f"{state.num_unfinished} unfinished requests, a replica runs {settings.max_num_seqs}"
    needs = [
        _queue_need(settings, state),
        _need_of(settings, state.num_unfinished / settings.max_num_seqs, by_rows),
        ReplicaNeed(_ceil(usage / settings.cache_usage), _ceil(usage / kept_usage), f"{usage:.2f} caches are in use"),
    ]
    if work.replica_tokens_per_s:
        by_work = work_need(settings, work.tokens_per_s, work.replica_tokens_per_s)
        if not work.is_firm:  # a rough capacity keeps replicas that a queue called for, and asks for no more
            by_work = by_work._replace(least=0, most=min(by_work.most, state.num_replicas))
        needs.append(by_work)
    least = max(needs, key=lambda need: need.least)
    return ReplicaNeed(least.least, max(need.most for need in needs), least.reason)


def work_need(settings: ScalingSettings, tokens_per_s: float, replica_tokens_per_s: float) -> ReplicaNeed:
    reason = f"{tokens_per_s:.0f} tokens/s are asked for, a replica computes {replica_tokens_per_s:.0f}"
    return _need_of(settings, tokens_per_s / replica_tokens_per_s, reason)


def _need_of(settings: ScalingSettings, num_full: float, reason: str) -> ReplicaNeed:
    return ReplicaNeed(_ceil(num_full / settings.utilisation), _ceil(num_full / settings.release_utilisation), reason)


def _queue_need(settings: ScalingSettings, state: FleetState) -> ReplicaNeed:
    """Return one replica per `waiting_per_replica` requests, one more for a late class, at most twice as many.

    All replicas stay while a quarter of that many requests wait.
    """
    ready, waiting = len(state.ready), state.num_waiting
    queues = waiting / settings.waiting_per_replica
    wanted, reason = _ceil(queues), f"{waiting} requests wait"
    late = min(filter(None, (late_class(settings, replica) for replica in state.ready)), default=None)
    if late is not None:
        wanted, reason = max(wanted, ready + 1), f"{late.name} waits beyond its limit, {waiting} requests in all"
    if wanted > ready:
        return ReplicaNeed(min(wanted, max(2 * ready, 1)), state.num_replicas, reason)
    return ReplicaNeed(0, state.num_replicas if queues > _KEPT_QUEUE * ready else 0, "no queue")


class Hysteresis:
    """Damping of replica counts: raised at once, lowered after fewer were enough for long."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._target: int | None = None
        self._since = self._last_request = self._changed = -math.inf
        self._num_arrivals = 0
        self._most = SlidingMaximum(settings.scale_down_after_s)

    def settle(self, state: FleetState, need: ReplicaNeed, hold_s: float) -> Decision:
        """Return the decision: fewer replicas once they were enough for `hold_s`, at most `scale_down_after_s`."""
        settings, now = self._settings, state.now
        if self._target is None:
            self._target, self._since = settings.clamp(state.num_replicas), now
            self._num_arrivals = state.num_arrivals
            if state.num_replicas:
                self._last_request = now  # keeps a fleet without requests for a while
        if state.num_unfinished or state.num_arrivals > self._num_arrivals:
            self._last_request = now
        self._num_arrivals = state.num_arrivals
        floor = 0 if now - self._last_request >= settings.idle_to_zero_s else 1
        least = settings.clamp(max(need.least, floor))
        most = settings.clamp(max(self._most.add(now, max(need.least, need.most), hold_s), floor))
        is_calm = now - self._changed >= settings.cool_down_s and now - self._since >= hold_s
        if least > self._target:
            target, reason = least, need.reason if need.least >= floor else "a request came"
        elif most < self._target and is_calm:
            target, reason = most, f"{most} were enough for {hold_s:g} s" if most else "no request came"
        else:
            return Decision(self._target, "enough")
        self._target, self._changed = target, now
        return Decision(target, reason)


class SlidingMaximum:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._numbers: deque[tuple[float, int]] = deque()  # (time, number), numbers falling

    def add(self, now: float, number: int, seconds: float) -> int:
        while self._numbers and self._numbers[-1][1] <= number:
            self._numbers.pop()
        self._numbers.append((now, number))
        while self._numbers[0][0] < now - self._seconds:
            self._numbers.popleft()
        return next(count for time, count in self._numbers if time >= now - seconds)


def _ceil(value: float) -> int:
    return math.ceil(value - _SLACK)


class PredictiveScaling(ReactiveScaling):
    """Policy that scales for the arrivals forecast within a replica's start-up time, and for the current work.

    Decides as `ReactiveScaling` before a full season, while the recent error is large, or the capacity unknown.
    Otherwise it scales down sooner, since replicas needed again by then are forecast.
    """

    def __init__(
        self, settings: ScalingSettings, forecast: ForecastSettings | None = None, history: Iterable[float] = ()
    ) -> None:
        """`history`: arrivals of earlier buckets; the last bucket ends with the first state."""
        forecast = forecast or ForecastSettings()
        super().__init__(settings)
        self._bucket_s = forecast.bucket_s
        self._lead = math.ceil(settings.startup_s / forecast.bucket_s) + 1  # the current bucket, and the start
        self._buckets = ArrivalBuckets(forecast.bucket_s)
        self.forecast = ArrivalForecast(forecast, lead=self._lead)
        self.forecast.learn(history)

    def decide(self, state: FleetState) -> Decision:
        work = self._meter.observe(state)
        self.forecast.learn(self._buckets.add(state.now, state.num_arrivals))
        need = current_need(self._settings, state, work)
        if not (self.forecast.is_reliable and work.is_firm and work.tokens_per_request):
            return self._hysteresis.settle(state, need, self._settings.scale_down_after_s)
        arrivals = max(self.forecast.ahead(buckets) for buckets in range(1, self._lead + 1)) / self._bucket_s
        ahead = work_need(self._settings, arrivals * work.tokens_per_request, work.replica_tokens_per_s)
        ahead = ahead._replace(reason=f"{arrivals:.3g} requests/s are forecast")
        least = max(ahead, need, key=lambda part: part.least)
        both = ReplicaNeed(least.least, max(ahead.least, need.most), least.reason)
        hold_s = min(max(self._settings.startup_s, self._bucket_s), self._settings.scale_down_after_s)
        return self._hysteresis.settle(state, both, hold_s)


class ConstantScaling:
    def __init__(self, settings: ScalingSettings) -> None:
        self._num_replicas = settings.max_replicas

    def decide(self, state: FleetState) -> Decision:  # noqa: ARG002
        return Decision(self._num_replicas, "constant")


class QueueDepthScaling:
    """Policy of deploy/kubernetes, for the HorizontalPodAutoscaler and KEDA.

    Adds one replica per 120 s at most, and removes one per 300 s.
    """

    UP_EVERY_S, DOWN_EVERY_S = 120.0, 300.0

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._wanted = SlidingMaximum(settings.scale_down_after_s)
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


class OngoingRequestScaling:
    """Policy of Ray Serve: a target for a replica's unfinished requests."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._hysteresis = Hysteresis(settings)

    def decide(self, state: FleetState) -> Decision:
        wanted = math.ceil(state.num_unfinished / self._settings.ongoing_per_replica)
        need = ReplicaNeed(wanted, wanted, f"{state.num_unfinished} unfinished requests")
        return self._hysteresis.settle(state, need, self._settings.scale_down_after_s)


SCALING_POLICIES: Mapping[str, Callable[[ScalingSettings], ScalingPolicy]] = MappingProxyType(
    {
        "reactive": ReactiveScaling,
        "predictive": PredictiveScaling,
        "queue-depth": QueueDepthScaling,
        "ongoing": OngoingRequestScaling,
        "constant": ConstantScaling,
    }
)


def check_scaling(name: str) -> None:
    """Raise `ConfigError` for an unknown policy name."""
    if name not in SCALING_POLICIES:
        raise ConfigError(f"scaling is {name!r}: choose one of {', '.join(SCALING_POLICIES)}")


def make_scaling(name: str, settings: ScalingSettings, history: Sequence[float] = ()) -> ScalingPolicy:
    """Return a policy. `history`: arrival times of past days, for `predictive`. Raise `ConfigError`."""
    check_scaling(name)
    if name == "predictive":
        forecast = ForecastSettings()
        return PredictiveScaling(settings, forecast, bucket_counts(history, forecast))
    return SCALING_POLICIES[name](settings)
