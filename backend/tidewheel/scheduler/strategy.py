"""When waiting requests may join the running ones. All strategies run on the same engine, so that they compare."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tidewheel.errors import ConfigError

FIRST_WINDOW_S = 0.050
MIN_WINDOW_S = 0.010
MAX_WINDOW_S = 0.100
BATCHES_PER_REVIEW = 10
TOLERANCE = 1.2  # latency over target above which the window shrinks

_SMOOTHING = 0.1  # weight of the newest batch
_GROWTH = 1.2
_FIRST_STEP = 1.25  # factor by which a window changes at first
_MIN_STEP = 1.02
_MAX_GAP_S = 1.0  # between batches, for the prediction: an idle hour says nothing of the load


class JoinView(NamedTuple):
    """What a strategy sees."""

    num_running: int
    num_waiting: int
    oldest_arrival: float  # of a waiting request, seconds; of no meaning when none waits
    max_num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConfig:
    name: str = "continuous"
    batch_size: int = 256  # static
    batch_timeout_s: float = 0.050  # static
    target_latency_s: float = 1.0  # dynamic, hybrid
    hybrid_threshold: int = 8
    hybrid_backlog: int = 256


class Strategy(Protocol):
    """Asked in every step; told what came of it. Requests that return after a preemption do not ask."""

    def max_joins(self, now: float, view: JoinView) -> int:
        """How many waiting requests may join in this step."""

    def joined(self, num_joined: int) -> None:
        """So many did, in the step that was scheduled."""

    def observe_batch(self, latency_s: float) -> None:
        """A step in which requests joined was applied, so long after the arrival of the oldest of them."""


class Continuous:
    """Any step."""

    def max_joins(self, now: float, view: JoinView) -> int:  # noqa: ARG002
        return view.num_waiting

    def joined(self, num_joined: int) -> None:
        """Nothing to remember."""

    def observe_batch(self, latency_s: float) -> None:
        """Nothing to learn."""


class _Batches:
    """Forms batches: a formed batch joins, over as many steps as budget and blocks ask for, before the next forms."""

    def __init__(self) -> None:
        self._num_left = 0  # of the formed batch, not joined yet

    def max_joins(self, now: float, view: JoinView) -> int:
        self._num_left = min(self._num_left, view.num_waiting)
        if not self._num_left:
            self._num_left = self._form(now, view)
        return self._num_left

    def joined(self, num_joined: int) -> None:
        self._num_left = max(self._num_left - num_joined, 0)

    def observe_batch(self, latency_s: float) -> None:
        """Nothing to learn."""

    def _form(self, now: float, view: JoinView) -> int:
        """Size of the batch that is formed now; 0: not yet."""
        raise NotImplementedError


class Static(_Batches):
    """`batch_size` requests, or those that are there when the oldest has waited `batch_timeout_s`. The batch runs to
    its end before the next one forms."""

    def __init__(self, batch_size: int, batch_timeout_s: float) -> None:
        super().__init__()
        self._batch_size = batch_size
        self._batch_timeout_s = batch_timeout_s

    def _form(self, now: float, view: JoinView) -> int:
        if view.num_running or not view.num_waiting:
            return 0
        size = min(self._batch_size, view.max_num_seqs, view.num_waiting)
        is_full = size == min(self._batch_size, view.max_num_seqs)
        return size if is_full or now - view.oldest_arrival >= self._batch_timeout_s else 0


class Window:
    """How long a dynamic batch is collected: every `BATCHES_PER_REVIEW` batches it becomes shorter if the smoothed
    latency is over `TOLERANCE` times the target, longer otherwise.

    The change is a factor, at first 1.25. When the direction turns, its logarithm is halved, down to 2 %; while the
    direction stays, it grows by a fifth, back up to 1.25 (as in Rprop: Riedmiller and Braun, 1993). So the window
    settles beside the point where it would otherwise swing by a quarter for ever.
    """

    __slots__ = ("_latency", "_num_batches", "_step", "_target_s", "_was_shorter", "seconds")

    def __init__(self, target_latency_s: float) -> None:
        self.seconds = FIRST_WINDOW_S
        self._target_s = target_latency_s
        self._latency: float | None = None
        self._num_batches = 0
        self._step = math.log(_FIRST_STEP)
        self._was_shorter: bool | None = None

    @property
    def latency_s(self) -> float:
        """Smoothed; 0 before the first batch."""
        return self._latency or 0.0

    def observe(self, latency_s: float) -> None:
        self._latency = (
            latency_s if self._latency is None else self._latency + _SMOOTHING * (latency_s - self._latency)
        )
        self._num_batches += 1
        if self._num_batches % BATCHES_PER_REVIEW == 0:
            self._review(self._latency > TOLERANCE * self._target_s)

    def _review(self, shorter: bool) -> None:
        if self._was_shorter is not None:
            step = self._step * (_GROWTH if shorter == self._was_shorter else 0.5)
            self._step = min(max(step, math.log(_MIN_STEP)), math.log(_FIRST_STEP))
        self._was_shorter = shorter
        seconds = self.seconds * math.exp(-self._step if shorter else self._step)
        self.seconds = min(max(seconds, MIN_WINDOW_S), MAX_WINDOW_S)


class Dynamic(_Batches):
    """Those that are there when the oldest has waited for the window, or as soon as they fill every free place."""

    def __init__(self, target_latency_s: float) -> None:
        super().__init__()
        self.window = Window(target_latency_s)

    def observe_batch(self, latency_s: float) -> None:
        self.window.observe(latency_s)

    def _form(self, now: float, view: JoinView) -> int:
        room = view.max_num_seqs - view.num_running
        is_due = view.num_waiting >= room or now - view.oldest_arrival >= self.window.seconds
        return min(view.num_waiting, room) if is_due and view.num_waiting else 0


class Hybrid(Dynamic):
    """At once while fewer than `threshold` requests run and wait, or more than `backlog` wait; dynamic batches
    between."""

    def __init__(self, target_latency_s: float, threshold: int, backlog: int) -> None:
        super().__init__(target_latency_s)
        self._threshold = threshold
        self._backlog = backlog

    def _form(self, now: float, view: JoinView) -> int:
        if view.num_running + view.num_waiting < self._threshold or view.num_waiting > self._backlog:
            return view.num_waiting
        return super()._form(now, view)


class Predictive(_Batches):
    """As many as are expected in `FIRST_WINDOW_S` at the rate of the last batches, or those that are there when the
    oldest has waited `MAX_WINDOW_S`.

    The rate is smoothed requests over smoothed seconds between batches, older batches counting less and less.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_formed: float | None = None
        self._requests = 1.0
        self._gap = FIRST_WINDOW_S

    @property
    def batch_size(self) -> int:
        return max(round(self._requests / self._gap * FIRST_WINDOW_S), 1)

    def _form(self, now: float, view: JoinView) -> int:
        room = view.max_num_seqs - view.num_running
        if not view.num_waiting or room < 1:
            return 0
        is_full = view.num_waiting >= min(self.batch_size, room)
        if not is_full and now - view.oldest_arrival < MAX_WINDOW_S:
            return 0
        self._learn(now, view.num_waiting)
        return min(view.num_waiting, room)

    def _learn(self, now: float, num_requests: int) -> None:
        if self._last_formed is not None:
            gap = min(max(now - self._last_formed, 1e-6), _MAX_GAP_S)
            self._requests += _SMOOTHING * (num_requests - self._requests)
            self._gap += _SMOOTHING * (gap - self._gap)
        self._last_formed = now


def make_strategy(config: StrategyConfig) -> Strategy:
    """Raises `ConfigError` for an unknown name."""
    match config.name:
        case "continuous":
            return Continuous()
        case "static":
            return Static(config.batch_size, config.batch_timeout_s)
        case "dynamic":
            return Dynamic(config.target_latency_s)
        case "predictive":
            return Predictive()
        case "hybrid":
            return Hybrid(config.target_latency_s, config.hybrid_threshold, config.hybrid_backlog)
    raise ConfigError(
        f"scheduling_strategy is {config.name!r}: choose one of continuous, static, dynamic, predictive, hybrid"
    )
