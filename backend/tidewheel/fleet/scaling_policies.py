import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tidewheel.fleet.scaling import FleetState, ScalingPolicy, ScalingSettings, WorkMeter, is_late

BUCKET_S = 300.0
NUM_BUCKETS = 288  # of a season, a day
LEVEL_WEIGHT = 0.3  # of the newest bucket
TREND_WEIGHT = 0.05
SEASON_WEIGHT = 0.3  # of the newest day
DAMPING = 0.9  # of the trend, per bucket
ERROR_BUCKETS = 6
ERROR_LIMIT = 0.3  # share of the arrivals
_LEAST = 1e-3  # of factors and levels: keeps quiet nights finite
_SLACK = 1e-9  # so that rounding asks for no replica
_KEPT_QUEUE = 0.25  # share of `waiting_per_replica` that keeps all replicas


class ReplicaNeed(NamedTuple):
    """Replica counts at which the fleet stays as it is: `least` to `most`."""

    least: int
    most: int


class ReactiveScaling:
    """Policy that scales up to the current need at once, and down to the largest recent need."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._meter = WorkMeter(settings)
        self._hysteresis = Hysteresis(settings)

    def decide(self, state: FleetState) -> int:
        self._meter.observe(state)
        need = current_need(self._settings, state, self._meter)
        return self._hysteresis.settle(state, need, self._settings.scale_down_after_s)


def current_need(settings: ScalingSettings, state: FleetState, work: WorkMeter) -> ReplicaNeed:
    usage = sum(replica.cache_usage for replica in state.ready)
    kept_usage = settings.cache_usage * settings.release_utilisation / settings.utilisation
    needs = [
        _queue_need(settings, state),
        _need_of(settings, state.num_unfinished / settings.max_num_seqs),
        ReplicaNeed(_ceil(usage / settings.cache_usage), _ceil(usage / kept_usage)),
    ]
    if work.replica_tokens_per_s:
        by_work = _need_of(settings, work.tokens_per_s / work.replica_tokens_per_s)
        if not work.is_firm:  # a rough capacity keeps replicas, and asks for none
            by_work = ReplicaNeed(0, min(by_work.most, state.num_replicas))
        needs.append(by_work)
    return ReplicaNeed(max(need.least for need in needs), max(need.most for need in needs))


def _need_of(settings: ScalingSettings, num_full: float) -> ReplicaNeed:
    return ReplicaNeed(_ceil(num_full / settings.utilisation), _ceil(num_full / settings.release_utilisation))


def _queue_need(settings: ScalingSettings, state: FleetState) -> ReplicaNeed:
    """Return one replica per `waiting_per_replica` waiting requests, or one more than are ready for a late class.

    The ready replicas double at most, and stay while each has a quarter of `waiting_per_replica`.
    """
    ready = len(state.ready)
    queues = state.num_waiting / settings.waiting_per_replica
    wanted = max(_ceil(queues), ready + 1 if any(map(is_late, state.ready)) else 0)
    if wanted > ready:
        return ReplicaNeed(min(wanted, max(2 * ready, 1)), state.num_replicas)
    return ReplicaNeed(0, state.num_replicas if queues > _KEPT_QUEUE * ready else 0)


class Hysteresis:
    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._target: int | None = None
        self._since = self._last_request = self._changed = -math.inf
        self._num_arrivals = 0
        self._most = SlidingMaximum(settings.scale_down_after_s)

    def settle(self, state: FleetState, need: ReplicaNeed, hold_s: float) -> int:
        """Return the damped count: up at once, down once fewer sufficed for `hold_s` <= `scale_down_after_s`."""
        settings, now = self._settings, state.now
        if self._target is None:
            self._target, self._since = settings.clamp(state.num_replicas), now
            self._num_arrivals = state.num_arrivals
            if state.num_replicas:
                self._last_request = now  # start of `idle_to_zero_s`
        if state.num_unfinished or state.num_arrivals > self._num_arrivals:
            self._last_request = now
        self._num_arrivals = state.num_arrivals
        floor = 0 if now - self._last_request >= settings.idle_to_zero_s else 1
        least = settings.clamp(max(need.least, floor))
        most = settings.clamp(max(self._most.add(now, max(need.least, need.most), hold_s), floor))
        is_calm = now - self._changed >= settings.cool_down_s and now - self._since >= hold_s
        if least > self._target:
            self._target, self._changed = least, now
        elif most < self._target and is_calm:
            self._target, self._changed = most, now
        return self._target


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


class ArrivalForecast:
    """Holt-Winters forecast of arrivals per bucket, ready after one season, a day (Management Science 6(3), 1960).

    Multiplicative season and damped trend (Gardner and McKenzie, Management Science 31(10), 1985).
    """

    def __init__(self, *, lead: int = 1) -> None:
        """`lead`: how many buckets ahead the forecast error is measured."""
        self._lead = lead
        self._first: list[float] = []
        self._season: list[float] = []
        self._level, self._trend = 0.0, 0.0
        self._next = 0
        self._made: deque[float] = deque(maxlen=lead)
        self._errors: deque[tuple[float, float]] = deque(maxlen=ERROR_BUCKETS)  # (error, arrivals)

    @property
    def is_ready(self) -> bool:
        return bool(self._season)

    @property
    def error(self) -> float:
        """Summed absolute error of the last `ERROR_BUCKETS` forecasts, over their arrivals; infinite with fewer."""
        if len(self._errors) < ERROR_BUCKETS:
            return math.inf
        errors = sum(error for error, _ in self._errors)
        return errors / max(sum(count for _, count in self._errors), 1.0)

    @property
    def is_reliable(self) -> bool:
        return self.error <= ERROR_LIMIT

    def ahead(self, buckets: int) -> float:
        """Return the arrivals expected in a future bucket (1: the next), once the forecast is ready."""
        trend = self._trend * math.fsum(math.pow(DAMPING, step) for step in range(1, buckets + 1))
        factor = self._season[(self._next + buckets - 1) % NUM_BUCKETS]
        return max(self._level + trend, 0.0) * factor

    def learn(self, counts: Iterable[float]) -> None:
        for count in counts:
            if not self.is_ready:
                self._begin(count)
                continue
            if len(self._made) == self._lead:
                self._errors.append((abs(self._made[0] - count), count))
            self._smooth(count)
            self._next += 1
            self._made.append(self.ahead(self._lead))

    def _begin(self, count: float) -> None:
        first = self._first
        first.append(count)
        self._next = num = len(first)
        if num == NUM_BUCKETS:
            self._level = max(sum(first) / num, _LEAST)
            means = [(first[index - 1] + first[index] + first[(index + 1) % num]) / 3 for index in range(num)]
            self._season = [max(mean / self._level, _LEAST) for mean in means]

    def _smooth(self, count: float) -> None:
        index = self._next % NUM_BUCKETS
        before, factor = self._level, self._season[index]
        expected = before + DAMPING * self._trend
        self._level = max(expected + LEVEL_WEIGHT * (count / factor - expected), _LEAST)
        self._trend = TREND_WEIGHT * (self._level - before) + (1 - TREND_WEIGHT) * DAMPING * self._trend
        self._season[index] = max(factor + SEASON_WEIGHT * (count / self._level - factor), _LEAST)


class ArrivalBuckets:
    """Arrivals per bucket of time, from an irregularly read counter."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self._end = 0.0
        self._count = 0.0

    def add(self, now: float, num_arrivals: int) -> list[float]:
        """Take a reading of the counter. Return the arrivals of each bucket that has ended since the last one."""
        if self._last is None:
            self._last, self._end = (now, num_arrivals), now + BUCKET_S
            return []
        time, before = self._last
        rate = max(num_arrivals - before, 0) / (now - time) if now > time else 0.0
        done = []
        while self._end <= now:
            done.append(self._count + rate * (self._end - time))
            time, self._count = self._end, 0.0
            self._end += BUCKET_S
        self._count += rate * (now - time)
        self._last = (now, num_arrivals)
        return done


class PredictiveScaling(ReactiveScaling):
    """Policy that scales for the current work, and for the arrivals forecast until a new replica would be ready.

    In the first season, after bad forecasts, and while the capacity is unknown, it is `ReactiveScaling`; otherwise it
    scales down sooner.
    """

    def __init__(self, settings: ScalingSettings, history: Iterable[float] = ()) -> None:
        """`history`: arrivals in each bucket up to the first state."""
        super().__init__(settings)
        self._lead = math.ceil(settings.startup_s / BUCKET_S) + 1  # the current bucket, and the start
        self._buckets = ArrivalBuckets()
        self.forecast = ArrivalForecast(lead=self._lead)
        self.forecast.learn(history)

    def decide(self, state: FleetState) -> int:
        work = self._meter
        work.observe(state)
        self.forecast.learn(self._buckets.add(state.now, state.num_arrivals))
        need = current_need(self._settings, state, work)
        if not (self.forecast.is_reliable and work.is_firm and work.tokens_per_request):
            return self._hysteresis.settle(state, need, self._settings.scale_down_after_s)
        arrivals = max(self.forecast.ahead(buckets) for buckets in range(1, self._lead + 1)) / BUCKET_S
        ahead = _need_of(self._settings, arrivals * work.tokens_per_request / work.replica_tokens_per_s).least
        both = ReplicaNeed(max(ahead, need.least), max(ahead, need.most))
        hold_s = min(max(self._settings.startup_s, BUCKET_S), self._settings.scale_down_after_s)
        return self._hysteresis.settle(state, both, hold_s)


SCALING_POLICIES: Mapping[str, Callable[[ScalingSettings], ScalingPolicy]] = {
    "reactive": ReactiveScaling,
    "predictive": PredictiveScaling,
}
