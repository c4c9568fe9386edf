"""What the front end counts of its requests: each once, where it entered.

Ledger, at any instant: ``num_received == num_live + completed + cancelled + rejected + failed``.
"""

from __future__ import annotations

import copy
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tidewheel.errors import TidewheelError
from tidewheel.frontend.values import PerfMetrics
from tidewheel.request import FinishReason

# Upper bounds in seconds: those of vLLM's metrics, so that dashboards made for it show the same buckets.
TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip

REFUSAL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

# Refused before anything was computed; other errors ended a request that had been accepted.
REJECTION_TAGS = frozenset(
    {"TW-INPUT", "TW-TOO-LARGE", "TW-UNSUPPORTED", "TW-NOT-FOUND", "TW-BUSY", "TW-DEADLINE", "TW-DRAINING"}
)


@dataclass(slots=True)
class LatencyHistogram:
    bounds: tuple[float, ...]  # upper bounds, seconds
    counts: list[int] = field(default_factory=list)  # [len(bounds) + 1], not cumulative; above all bounds last
    total: float = 0.0  # sum of the values

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times the same value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


@dataclass(slots=True)
class FrontendStats:
    """Everything but `num_live` only grows. `e2e_latency` is of requests that finished, `queue_time` from the arrival
    to the first step, `refusal_time` from the arrival to the answer of requests that the engine never accepted."""

    num_received: int = 0
    num_live: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason: stop, length, cancelled, …
    rejected: Counter[str] = field(default_factory=Counter)  # by error tag: refused before anything was computed
    failed: Counter[str] = field(default_factory=Counter)  # by error tag: ended by an error after they were accepted
    num_prompt_tokens: int = 0  # of requests that the engine began
    num_generation_tokens: int = 0
    time_to_first_token: LatencyHistogram = field(default_factory=partial(LatencyHistogram, TTFT_BOUNDS))
    inter_token_latency: LatencyHistogram = field(default_factory=partial(LatencyHistogram, INTER_TOKEN_BOUNDS))
    e2e_latency: LatencyHistogram = field(default_factory=partial(LatencyHistogram, REQUEST_BOUNDS))
    queue_time: LatencyHistogram = field(default_factory=partial(LatencyHistogram, REQUEST_BOUNDS))
    refusal_time: LatencyHistogram = field(default_factory=partial(LatencyHistogram, REFUSAL_BOUNDS))


class TokenTiming(NamedTuple):
    """One delta, as it came in: seconds since the one before it, or since the arrival."""

    seconds: float | None  # None: the first of a sequence whose request has begun already
    num_tokens: int
    num_prompt_tokens: int  # 0 unless these are the first tokens


class StatsRecorder:
    """Counts on behalf of all threads of a front end; each call takes the lock once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = FrontendStats()

    def received(self) -> None:
        with self._lock:
            self._stats.num_received += 1
            self._stats.num_live += 1

    def tokens(self, timings: Iterable[TokenTiming]) -> None:
        with self._lock:
            for timing in timings:
                self._stats.num_generation_tokens += timing.num_tokens
                self._stats.num_prompt_tokens += timing.num_prompt_tokens
                if timing.seconds is None:
                    continue
                if timing.num_prompt_tokens:
                    self._stats.time_to_first_token.observe(timing.seconds)
                else:
                    self._stats.inter_token_latency.observe(timing.seconds / timing.num_tokens, timing.num_tokens)

    def finished(self, reason: str, seconds: float, perf: PerfMetrics | None) -> None:
        with self._lock:
            self._stats.num_live -= 1
            self._stats.finished[reason] += 1
            if reason != FinishReason.CANCELLED:
                self._stats.e2e_latency.observe(seconds)
            if perf is not None and perf.first_scheduled_ns:
                self._stats.queue_time.observe(max(perf.first_scheduled_ns - perf.arrival_ns, 0) / 1e9)

    def ended_by(self, error: TidewheelError, *, began: bool, refused_after: float | None = None) -> None:
        """`began`: it has got tokens. `refused_after`: seconds since its arrival, if the engine never accepted it."""
        with self._lock:
            self._stats.num_live -= 1
            is_rejection = error.tag in REJECTION_TAGS and not began
            (self._stats.rejected if is_rejection else self._stats.failed)[error.tag] += 1
            if refused_after is not None:
                self._stats.refusal_time.observe(refused_after)

    def snapshot(self) -> FrontendStats:
        with self._lock:
            return copy.deepcopy(self._stats)
