"""What the front end counts of its requests: each once, where it entered.

Ledger, at any instant: ``num_received == num_live + completed + cancelled + rejected + failed``.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


class HistogramSnapshot(NamedTuple):
    bounds: tuple[float, ...]  # upper bounds, seconds
    counts: tuple[int, ...]  # [len(bounds) + 1] values in each bucket, not cumulative; above all bounds last
    total: float  # sum of the values


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendStats:
    """A snapshot; everything but `num_live` only grows."""

    num_received: int
    num_live: int
    finished: Mapping[str, int]  # by finish reason: stop, length, cancelled, …
    rejected: Mapping[str, int]  # by error tag: refused before anything was computed
    failed: Mapping[str, int]  # by error tag: ended by an error after they had been accepted
    num_prompt_tokens: int  # of requests that the engine began
    num_generation_tokens: int
    time_to_first_token: HistogramSnapshot
    inter_token_latency: HistogramSnapshot
    e2e_latency: HistogramSnapshot  # of requests that finished
    queue_time: HistogramSnapshot  # from arrival to the first step that computed them
    refusal_time: HistogramSnapshot  # from arrival to the answer, of requests that the engine never accepted


class TokenTiming(NamedTuple):
    """One delta, as it came in: seconds since the one before it, or since the arrival."""

    seconds: float | None  # None: the first of a sequence whose request has begun already
    num_tokens: int
    num_prompt_tokens: int  # 0 unless these are the first tokens


class StatsRecorder:
    """Counts on behalf of all threads of a front end; each call takes the lock once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_received = 0
        self._num_ended = 0
        self._finished: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._time_to_first_token = Histogram(TTFT_BOUNDS)
        self._inter_token_latency = Histogram(INTER_TOKEN_BOUNDS)
        self._e2e_latency = Histogram(REQUEST_BOUNDS)
        self._queue_time = Histogram(REQUEST_BOUNDS)
        self._refusal_time = Histogram(REFUSAL_BOUNDS)

    def received(self) -> None:
        with self._lock:
            self._num_received += 1

    def tokens(self, timings: Iterable[TokenTiming]) -> None:
        with self._lock:
            for timing in timings:
                self._num_generation_tokens += timing.num_tokens
                if timing.num_prompt_tokens:
                    self._num_prompt_tokens += timing.num_prompt_tokens
                if timing.seconds is None:
                    continue
                if timing.num_prompt_tokens:
                    self._time_to_first_token.observe(timing.seconds)
                else:
                    self._inter_token_latency.observe(timing.seconds / timing.num_tokens, timing.num_tokens)

    def finished(self, reason: str, seconds: float, perf: PerfMetrics | None) -> None:
        with self._lock:
            self._num_ended += 1
            self._finished[reason] += 1
            if reason != FinishReason.CANCELLED:
                self._e2e_latency.observe(seconds)
            if perf is not None and perf.first_scheduled_ns:
                self._queue_time.observe(max(perf.first_scheduled_ns - perf.arrival_ns, 0) / 1e9)

    def ended_by(self, error: TidewheelError, seconds: float, *, began: bool, was_accepted: bool) -> None:
        """`seconds` after its arrival. `began`: it has got tokens."""
        with self._lock:
            self._num_ended += 1
            is_rejection = error.tag in REJECTION_TAGS and not began
            (self._rejected if is_rejection else self._failed)[error.tag] += 1
            if not was_accepted:
                self._refusal_time.observe(seconds)

    def snapshot(self) -> FrontendStats:
        with self._lock:
            return FrontendStats(
                num_received=self._num_received,
                num_live=self._num_received - self._num_ended,
                finished=dict(self._finished),
                rejected=dict(self._rejected),
                failed=dict(self._failed),
                num_prompt_tokens=self._num_prompt_tokens,
                num_generation_tokens=self._num_generation_tokens,
                time_to_first_token=self._time_to_first_token.snapshot(),
                inter_token_latency=self._inter_token_latency.snapshot(),
                e2e_latency=self._e2e_latency.snapshot(),
                queue_time=self._queue_time.snapshot(),
                refusal_time=self._refusal_time.snapshot(),
            )
