from __future__ import annotations

import copy
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tidewheel.engine.messages import RequestStats
from tidewheel.errors import TidewheelError
from tidewheel.request import FinishReason

# Upper bounds in seconds, as in vLLM's metrics.
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

# Refusals before any computation.
REJECTION_TAGS = frozenset(
    {"TW-INPUT", "TW-TOO-LARGE", "TW-UNSUPPORTED", "TW-NOT-FOUND", "TW-BUSY", "TW-DEADLINE", "TW-DRAINING"}
)


@dataclass(slots=True)
class LatencyHistogram:
    bounds: tuple[float, ...]  # upper, in seconds
    counts: list[int] = field(default_factory=list)  # [len(bounds) + 1], not cumulative
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


@dataclass(slots=True)
class FrontendStats:
    """Counters and latencies from arrival, with ``num_received == num_live + finished + rejected + failed``."""

    num_received: int = 0
    num_live: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    rejected: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)  # by error tag
    num_prompt_tokens: int = 0  # of requests with tokens
    num_generation_tokens: int = 0
    time_to_first_token: LatencyHistogram = field(default_factory=partial(LatencyHistogram, TTFT_BOUNDS))
    inter_token_latency: LatencyHistogram = field(default_factory=partial(LatencyHistogram, INTER_TOKEN_BOUNDS))
    e2e_latency: LatencyHistogram = field(default_factory=partial(LatencyHistogram, REQUEST_BOUNDS))
    queue_time: LatencyHistogram = field(default_factory=partial(LatencyHistogram, REQUEST_BOUNDS))
    refusal_time: LatencyHistogram = field(default_factory=partial(LatencyHistogram, REFUSAL_BOUNDS))


class TokenTiming(NamedTuple):
    seconds: float | None  # None: first of a later sequence
    num_tokens: int
    num_prompt_tokens: int  # with the first tokens


class StatsRecorder:
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

    def finished(self, reason: str, seconds: float, stats: RequestStats | None) -> None:
        with self._lock:
            self._stats.num_live -= 1
            self._stats.finished[reason] += 1
            if reason != FinishReason.CANCELLED:
                self._stats.e2e_latency.observe(seconds)
            if stats is not None and stats.first_scheduled_ns:
                self._stats.queue_time.observe(max(stats.first_scheduled_ns - stats.arrival_ns, 0) / 1e9)

    def failed(self, error: TidewheelError, *, had_output: bool, refused_after: float | None = None) -> None:
        """Count an error. `refused_after`: seconds from arrival, if never accepted."""
        with self._lock:
            self._stats.num_live -= 1
            is_rejection = error.tag in REJECTION_TAGS and not had_output
            (self._stats.rejected if is_rejection else self._stats.failed)[error.tag] += 1
            if refused_after is not None:
                self._stats.refusal_time.observe(refused_after)

    def snapshot(self) -> FrontendStats:
        with self._lock:
            return copy.deepcopy(self._stats)
