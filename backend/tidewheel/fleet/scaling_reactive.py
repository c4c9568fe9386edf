"""Scaling by what is asked now: work, rows, waiting requests and their age."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from tidewheel.fleet.scaling import Decision, FleetState, ScalingSettings
from tidewheel.fleet.scaling_load import Work, WorkMeter, late_class

_SLACK = 1e-9  # so that rounding asks for no replica more
_KEPT_QUEUE = 0.25


class Need(NamedTuple):
    """Between `least` and `most` replicas nothing changes: the hysteresis."""

    least: int
    most: int
    reason: str  # of `least`


class Reactive:
    """Scale up at once for the largest need; scale down to the largest need of the last minutes."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._meter = WorkMeter(settings)
        self._steady = Steady(settings)

    def decide(self, state: FleetState) -> Decision:
        need = current_need(self._settings, state, self._meter.observe(state))
        return self._steady.settle(state, need, self._settings.scale_down_after_s)


def current_need(settings: ScalingSettings, state: FleetState, work: Work) -> Need:
    needs = [_queue_need(settings, state), _row_need(settings, state), _cache_need(settings, state)]
    if work.replica_tokens_per_s:
        by_work = work_need(settings, work.tokens_per_s, work.replica_tokens_per_s)
        # A rough capacity keeps the replicas that a queue has called for, and asks for none.
        needs.append(by_work if work.is_firm else Need(0, min(by_work.most, state.num_replicas), by_work.reason))
    least = max(needs, key=lambda need: need.least)
    return Need(least.least, max(need.most for need in needs), least.reason)


def work_need(settings: ScalingSettings, tokens_per_s: float, replica_tokens_per_s: float) -> Need:
    share = tokens_per_s / replica_tokens_per_s
    reason = f"{tokens_per_s:.0f} tokens/s are asked for, a replica computes {replica_tokens_per_s:.0f}"
    return Need(_ceil(share / settings.utilisation), _ceil(share / settings.release_utilisation), reason)


def _row_need(settings: ScalingSettings, state: FleetState) -> Need:
    share = state.num_unfinished / settings.max_num_seqs
    reason = f"{state.num_unfinished} unfinished requests, a replica runs {settings.max_num_seqs}"
    return Need(_ceil(share / settings.utilisation), _ceil(share / settings.release_utilisation), reason)


def _cache_need(settings: ScalingSettings, state: FleetState) -> Need:
    usage = sum(replica.cache_usage for replica in state.ready)
    most = _ceil(usage / (settings.cache_usage * settings.release_utilisation / settings.utilisation))
    return Need(_ceil(usage / settings.cache_usage), most, f"{usage:.2f} caches are in use")


def _queue_need(settings: ScalingSettings, state: FleetState) -> Need:
    """Return one replica per `waiting_per_replica`, at least one more if a class waits too long, at most the double.

    All of them stay while a fourth of that many requests wait.
    """
    ready, waiting = len(state.ready), state.num_waiting
    queues = waiting / settings.waiting_per_replica
    wanted, reason = _ceil(queues), f"{waiting} requests wait"
    late = min(filter(None, (late_class(settings, replica) for replica in state.ready)), default=None)
    if late is not None:
        wanted, reason = max(wanted, ready + 1), f"{late.name} waits beyond its limit, {waiting} requests in all"
    if wanted > ready:
        return Need(min(wanted, max(2 * ready, 1)), state.num_replicas, reason)
    return Need(0, state.num_replicas if queues > _KEPT_QUEUE * ready else 0, "no queue")


class Steady:
    """Keep the number until a need has left it, below for long enough."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._target: int | None = None
        self._since = self._last_request = self._changed = -math.inf
        self._num_arrivals = 0
        self._most = Largest(settings.scale_down_after_s)

    def settle(self, state: FleetState, need: Need, hold_s: float) -> Decision:
        """Return the decision: fewer replicas only if the last `hold_s`, `scale_down_after_s` at most, allow it."""
        if self._target is None:
            self._begin(state)
        assert self._target is not None
        floor = self._floor(state)
        least = self._settings.clamp(max(need.least, floor))
        most = self._settings.clamp(max(self._most.add(state.now, max(need.least, need.most), hold_s), floor))
        if least > self._target:
            return self._change(state.now, least, need.reason if need.least >= floor else "a request came")
        is_calm = state.now - self._changed >= self._settings.cool_down_s
        if most < self._target and is_calm and state.now - self._since >= hold_s:
            return self._change(
                state.now, most, f"{most} were enough for {hold_s:g} s" if most else "no request came"
            )
        return Decision(self._target, "enough")

    def _begin(self, state: FleetState) -> None:
        self._target, self._since = self._settings.clamp(state.num_replicas), state.now
        self._num_arrivals = state.num_arrivals
        if state.num_replicas:
            self._last_request = state.now  # so that a fleet without requests is kept for a while

    def _change(self, now: float, target: int, reason: str) -> Decision:
        self._target, self._changed = target, now
        return Decision(target, reason)

    def _floor(self, state: FleetState) -> int:
        """Return 0 if no request was there for `idle_to_zero_s`."""
        if state.num_unfinished or state.num_arrivals > self._num_arrivals:
            self._last_request = state.now
        self._num_arrivals = state.num_arrivals
        return 0 if state.now - self._last_request >= self._settings.idle_to_zero_s else 1


class Largest:
    """Largest of the numbers of the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._numbers: deque[tuple[float, int]] = deque()  # (time, number), later ones are smaller

    def add(self, now: float, number: int, seconds: float) -> int:
        """Return the largest one of the last `seconds`, at most those of the constructor."""
        while self._numbers and self._numbers[-1][1] <= number:
            self._numbers.pop()
        self._numbers.append((now, number))
        while self._numbers[0][0] < now - self._seconds:
            self._numbers.popleft()
        return next(count for time, count in self._numbers if time >= now - seconds)


def _ceil(value: float) -> int:
    return math.ceil(value - _SLACK)
