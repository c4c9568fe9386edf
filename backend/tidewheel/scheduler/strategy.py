import math
from collections.abc import Mapping
from typing import NamedTuple

from tidewheel.config import SchedulingSettings

FIRST_WINDOW_S = 0.050
MIN_WINDOW_S = 0.010
MAX_WINDOW_S = 0.100
BATCHES_PER_REVIEW = 10
TOLERANCE = 1.2  # latency / target that shrinks the window

_SMOOTHING = 0.1
_GROWTH = 1.2
_FIRST_STEP = 1.25
_MIN_STEP = 1.02
_MAX_GAP_S = 1.0  # idle time says nothing about load


class JoinView(NamedTuple):
    num_running: int
    num_waiting: int
    oldest_arrival: float  # seconds; undefined if none waits
    max_num_seqs: int


class Strategy:
    def __init__(self, settings: SchedulingSettings) -> None:
        self._settings = settings
        self._num_left = 0

    def max_joins(self, now: float, view: JoinView) -> int:
        self._num_left = min(self._num_left, view.num_waiting)
        if not self._num_left and view.num_waiting:
            self._num_left = self._form(now, view)
        return self._num_left

    def joined(self, num_joined: int) -> None:
        self._num_left = max(self._num_left - num_joined, 0)

    def observe_batch(self, latency_s: float) -> None:
        """Learn the seconds from a batch's oldest arrival to its first step's end."""

    def _form(self, now: float, view: JoinView) -> int:
        raise NotImplementedError


class ContinuousStrategy(Strategy):
    def max_joins(self, now: float, view: JoinView) -> int:  # noqa: ARG002
        return view.num_waiting


class StaticStrategy(Strategy):
    """Strategy that forms a batch when nothing runs, of `batch_size` requests or after `batch_timeout_ms`."""

    def _form(self, now: float, view: JoinView) -> int:
        size = min(self._settings.batch_size or self._settings.max_num_seqs, view.max_num_seqs)
        is_due = view.num_waiting >= size or now - view.oldest_arrival >= 1e-3 * self._settings.batch_timeout_ms
        return min(size, view.num_waiting) if is_due and not view.num_running else 0


class DynamicStrategy(Strategy):
    """Strategy that forms a batch when the oldest request has waited for the window, or all free rows are filled.

    Every `BATCHES_PER_REVIEW` batches the window shrinks if smoothed latency exceeds `TOLERANCE` times the target,
    else grows, at first by the factor 1.25. Its logarithm is halved when the direction turns (down to 1.02), else
    grows by a fifth (as in Rprop: Riedmiller and Braun, 1993).
    """

    def __init__(self, settings: SchedulingSettings) -> None:
        super().__init__(settings)
        self.window_s = FIRST_WINDOW_S
        self.latency_s = 0.0  # smoothed
        self._num_batches = 0
        self._step = math.log(_FIRST_STEP)
        self._direction = 0.0  # 1 longer, -1 shorter

    def observe_batch(self, latency_s: float) -> None:
        self.latency_s += (_SMOOTHING if self._num_batches else 1.0) * (latency_s - self.latency_s)
        self._num_batches += 1
        if self._num_batches % BATCHES_PER_REVIEW:
            return
        target_s = 1e-3 * self._settings.batch_target_latency_ms
        direction = -1.0 if self.latency_s > TOLERANCE * target_s else 1.0
        step = self._step * (0.5 if direction == -self._direction else _GROWTH)
        self._step = min(max(step, math.log(_MIN_STEP)), math.log(_FIRST_STEP))
        self._direction = direction
        self.window_s = min(max(self.window_s * math.exp(direction * self._step), MIN_WINDOW_S), MAX_WINDOW_S)

    def _form(self, now: float, view: JoinView) -> int:
        num_places = view.max_num_seqs - view.num_running
        is_due = view.num_waiting >= num_places or now - view.oldest_arrival >= self.window_s
        return min(view.num_waiting, num_places) if is_due else 0


class HybridStrategy(DynamicStrategy):
    """Dynamic batches, but at low load or with a backlog all waiting requests join at once."""

    def _form(self, now: float, view: JoinView) -> int:
        is_low = view.num_running + view.num_waiting < self._settings.hybrid_threshold
        if is_low or view.num_waiting > self._settings.hybrid_backlog:
            return view.num_waiting
        return super()._form(now, view)


class PredictiveStrategy(Strategy):
    """Strategy that forms batches as large as arrive in `FIRST_WINDOW_S` on average, or after `MAX_WINDOW_S`."""

    def __init__(self, settings: SchedulingSettings) -> None:
        super().__init__(settings)
        self._last_formed: float | None = None
        self._requests = 1.0
        self._gap = FIRST_WINDOW_S

    @property
    def batch_size(self) -> int:
        return max(round(self._requests / self._gap * FIRST_WINDOW_S), 1)

    def _form(self, now: float, view: JoinView) -> int:
        num_places = view.max_num_seqs - view.num_running
        is_due = view.num_waiting >= min(self.batch_size, num_places) or now - view.oldest_arrival >= MAX_WINDOW_S
        if num_places < 1 or not is_due:
            return 0
        if self._last_formed is not None:
            gap = min(max(now - self._last_formed, 1e-6), _MAX_GAP_S)
            self._requests += _SMOOTHING * (view.num_waiting - self._requests)
            self._gap += _SMOOTHING * (gap - self._gap)
        self._last_formed = now
        return min(view.num_waiting, num_places)


STRATEGIES: Mapping[str, type[Strategy]] = {
    "continuous": ContinuousStrategy,
    "static": StaticStrategy,
    "dynamic": DynamicStrategy,
    "predictive": PredictiveStrategy,
    "hybrid": HybridStrategy,
}
