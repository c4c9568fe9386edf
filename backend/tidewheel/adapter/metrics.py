"""Figures on Triton's `/metrics`.

Each call of a metric is a round trip (20 to 60 µs, measured), so only differences of totals are sent. A histogram
takes one value a call, at most `MAX_OBSERVATIONS` in a flush. Front ends share series of equal name and labels, whose
differences add up. A metric lives until its process ends: if it is deleted, the server removes the series under other
front ends that write to it (2.51 then hangs).
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from tidewheel.adapter.metric_families import (
    ANSWERED,
    CACHE_BLOCKS,
    CACHE_CONFIG,
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    ENGINE_READY,
    ENGINE_RESTARTS,
    FAILED,
    FINISHED,
    GENERATION_TOKENS,
    IN_TIME,
    PROMPT_TOKENS,
    RECEIVED,
    REJECTED,
    REQUEST_HISTOGRAMS,
    STEP_TOKENS,
    TENANT_COUNTERS,
    TOKEN_HISTOGRAMS,
    Labels,
)
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import TAGS
from tidewheel.frontend.request_figures import REJECTION_TAGS, FrontendStats
from tidewheel.request import FinishReason, Priority
from tidewheel.stats import STEP_BOUNDS, EngineStats, Histogram

FLUSH_INTERVAL_S = 0.4
RENEWAL = 25  # flushes after which gauges are sent again
MAX_OBSERVATIONS = 64  # per histogram and flush: 160 a second
MAX_WAITING = 1024  # values of a histogram, for later flushes
_ROUNDING = 1e-6  # of sums of shares


class Gauge:
    def __init__(self, family: Any, labels: Labels) -> None:
        self._metric = _for_good(family.Metric(labels=dict(labels)))
        self._value: float | None = None

    def set(self, value: float) -> None:
        if value != self._value:
            self._metric.set(value)
            self._value = value

    def forget(self) -> None:
        """Send the next value in any case."""
        self._value = None


class Counter:
    """Growing total. A smaller one comes from a restarted process."""

    def __init__(self, family: Any, labels: Labels) -> None:
        self._metric = _for_good(family.Metric(labels=dict(labels)))
        self._total = 0.0

    def advance(self, total: float) -> None:
        difference = total - self._total if total >= self._total else total
        if difference > 0:
            self._metric.increment(difference)
        self._total = total

    def follow(self, total: float) -> None:
        """Skip what others have published."""
        self._total = total


class CounterByLabel:
    """Counters that differ in one label."""

    def __init__(self, family: Any, labels: Labels, label: str, values: Sequence[str] = ()) -> None:
        self._family = family
        self._labels = labels
        self._label = label
        self._counters: dict[str, Counter] = {}
        for value in values:
            self._counter(value)

    def advance(self, totals: Mapping[str, float]) -> None:
        for value, total in totals.items():
            self._counter(value).advance(total)

    def follow(self, totals: Mapping[str, float]) -> None:
        for value, total in totals.items():
            self._counter(value).follow(total)

    def _counter(self, value: str) -> Counter:
        if value not in self._counters:
            self._counters[value] = Counter(self._family, {**self._labels, self._label: value})
        return self._counters[value]


class HistogramSeries:
    """Histogram that grows by the differences of one counted here.

    A value stands for its bucket: the mean of the bucket's values that wait, so that the sum is right. At most
    `MAX_OBSERVATIONS` go out at once. If more than `MAX_WAITING` wait, each bucket loses its share of the new ones.
    """

    def __init__(self, name: str, description: str, bounds: Sequence[float], labels: Labels) -> None:
        family = pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.HISTOGRAM)
        self._metric = _for_good(_for_good(family).Metric(labels=dict(labels), buckets=list(bounds)))
        self._seen = Histogram(tuple(bounds))
        self._counts = [0.0] * len(self._seen.counts)  # of values that wait, by bucket
        self._sums = [0.0] * len(self._seen.counts)

    def advance(self, now: Histogram) -> None:
        self._take(now)
        num_waiting = sum(self._counts)
        if num_waiting < 1.0:
            return
        share = min(1.0, MAX_OBSERVATIONS / num_waiting)
        for bucket, count in enumerate(self._counts):
            self._observe(bucket, int(share * count + _ROUNDING))

    def follow(self, now: Histogram) -> None:
        """Skip what others have published."""
        self._seen = now.copy()

    def _take(self, now: Histogram) -> None:
        seen = self._seen
        if now.counts == seen.counts:
            return
        if sum(now.counts) <= sum(seen.counts):  # of a restarted process
            seen = Histogram(now.bounds)
        self.follow(now)
        num_new = sum(now.counts) - sum(seen.counts)
        share = min(1.0, (MAX_WAITING - sum(self._counts)) / max(num_new, 1))
        for bucket, count in enumerate(now.counts):
            self._counts[bucket] += share * (count - seen.counts[bucket])
            self._sums[bucket] += share * (now.sums[bucket] - seen.sums[bucket])

    def _observe(self, bucket: int, num_values: int) -> None:
        if not num_values:
            return
        bounds, mean = self._seen.bounds, self._sums[bucket] / self._counts[bucket]
        if bucket < len(bounds):
            mean = min(mean, bounds[bucket])
        if bucket:
            mean = max(mean, math.nextafter(bounds[bucket - 1], math.inf))
        self._sums[bucket] *= 1.0 - num_values / self._counts[bucket]
        self._counts[bucket] -= num_values
        for _ in range(num_values):
            self._metric.observe(mean)


def _for_good(thing: Any) -> Any:
    """Keep the object while the interpreter ends, too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


def counter_family(name: str, description: str) -> Any:
    return _for_good(pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.COUNTER))


def gauge_family(name: str, description: str) -> Any:
    return _for_good(pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.GAUGE))


class EngineMetrics:
    """Engine figures, published by the front end that holds the engine's lock."""

    def __init__(self, info: EngineInfo, labels: Labels) -> None:
        self._block_size = info.block_size
        gauges = {f.name: gauge_family(f.name, f.description) for f in ENGINE_GAUGES}
        counters = {f.name: counter_family(f.name, f.description) for f in ENGINE_COUNTERS}
        self._gauges = [(f.of, Gauge(gauges[f.name], {**labels, **f.labels})) for f in ENGINE_GAUGES]
        self._counters = [(f.of, Counter(counters[f.name], {**labels, **f.labels})) for f in ENGINE_COUNTERS]
        self._by_tenant = [
            (f.of, CounterByLabel(counter_family(f.name, f.description), labels, "tenant")) for f in TENANT_COUNTERS
        ]
        blocks = gauge_family(*CACHE_BLOCKS)
        names = {"model": labels["model"], "version": labels["version"]}
        self._max, self._used, self._tokens_per = (
            Gauge(blocks, {"kv_cache_block_type": kind, **names}) for kind in ("max", "used", "tokens_per")
        )
        sizes = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}  # on a CPU, too
        self._config = Gauge(gauge_family(*CACHE_CONFIG), {**labels, **sizes})
        self._ready = Gauge(gauge_family(*ENGINE_READY), labels)
        self._restarts = Counter(counter_family(*ENGINE_RESTARTS), labels)
        self._step_tokens = HistogramSeries(*STEP_TOKENS, STEP_BOUNDS, labels)
        self._num_published = 0

    def publish_ready(self, is_ready: bool | None) -> None:
        """Publish readiness; None: another front end does."""
        if is_ready is None:
            self._ready.forget()
        else:
            self._ready.set(float(is_ready))

    def publish_restarts(self, count: int, *, is_owner: bool) -> None:
        """Publish them, or note what the owner publishes."""
        (self._restarts.advance if is_owner else self._restarts.follow)(count)

    def publish(self, stats: EngineStats) -> None:
        self._num_published += 1
        if self._num_published % RENEWAL == 0:  # another front end may have cleared them
            self._forget()
        for of, gauge in self._gauges:
            gauge.set(of(stats))
        for of, counter in self._counters:
            counter.advance(of(stats))
        for of_tenant, by_tenant in self._by_tenant:
            by_tenant.advance({label: of_tenant(figures) for label, figures in stats.tenants.items()})
        self._max.set(stats.num_blocks)
        self._used.set(stats.num_blocks - stats.num_free_blocks)
        self._tokens_per.set(self._block_size)
        self._config.set(1.0)
        self._step_tokens.advance(stats.step_tokens)

    def follow(self, stats: EngineStats) -> None:
        """Note what the owner publishes, to continue there after a takeover."""
        for of, counter in self._counters:
            counter.follow(of(stats))
        for of_tenant, by_tenant in self._by_tenant:
            by_tenant.follow({label: of_tenant(figures) for label, figures in stats.tenants.items()})
        self._step_tokens.follow(stats.step_tokens)
        self._forget()

    def clear(self) -> None:
        """Show no engine: the last values would stand for ever."""
        idle = EngineStats()
        for of, gauge in self._gauges:
            gauge.set(of(idle))
        for gauge in self._others():
            gauge.set(0.0)

    def _forget(self) -> None:
        for gauge in (*(gauge for _, gauge in self._gauges), *self._others()):
            gauge.forget()

    def _others(self) -> tuple[Gauge, ...]:
        return self._max, self._used, self._tokens_per, self._config, self._ready


class RequestMetrics:
    def __init__(self, labels: Labels, stats: FrontendStats) -> None:
        """Publish what grows beyond `stats`."""
        self._received = Counter(counter_family(*RECEIVED), labels)
        reasons = [reason for reason in FinishReason if reason != "error"]
        self._finished = CounterByLabel(counter_family(*FINISHED), labels, "finished_reason", reasons)
        self._rejected = CounterByLabel(counter_family(*REJECTED), labels, "tag", sorted(REJECTION_TAGS))
        self._failed = CounterByLabel(counter_family(*FAILED), labels, "tag", sorted(TAGS))
        classes = [priority.name.lower() for priority in Priority]
        self._answered = CounterByLabel(counter_family(*ANSWERED), labels, "class", classes)
        self._in_time = CounterByLabel(counter_family(*IN_TIME), labels, "class", classes)
        self._prompt = Counter(counter_family(*PROMPT_TOKENS), labels)
        self._generation = Counter(counter_family(*GENERATION_TOKENS), labels)
        self._histograms = [
            (f.of, HistogramSeries(f.name, f.description, f.of(stats).bounds, labels))
            for f in (*REQUEST_HISTOGRAMS, *TOKEN_HISTOGRAMS)
        ]

    def publish(self, stats: FrontendStats, refused: Mapping[str, int]) -> None:
        """Publish figures, with `refused` requests that never reached the front end, by tag."""
        self._received.advance(stats.num_received + sum(refused.values()))
        self._finished.advance(stats.finished)
        self._failed.advance(stats.failed)
        self._prompt.advance(stats.num_prompt_tokens)
        self._generation.advance(stats.num_generation_tokens)
        for of, histogram in self._histograms:
            histogram.advance(of(stats))
        self._answered.advance(_by_class(stats.answered))
        self._in_time.advance(_by_class(stats.in_time))
        # Last, so that a visible refusal implies the others.
        self._rejected.advance({tag: stats.rejected.get(tag, 0) + refused.get(tag, 0) for tag in REJECTION_TAGS})


def _by_class(counts: Mapping[Priority, int]) -> dict[str, float]:
    return {priority.name.lower(): count for priority, count in counts.items()}


class MetricsPublisher:
    """Thread that calls `publish` every `interval_s` and at the end. One call at a time."""

    def __init__(self, publish: Callable[[], None], interval_s: float = FLUSH_INTERVAL_S) -> None:
        self._publish = publish
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._last_problem = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        with self._lock:
            try:
                self._publish()
            except Exception as error:
                if str(error) != self._last_problem:  # log once
                    self._last_problem = str(error)
                    pb_utils.Logger.log_error(f"metrics could not be published: {error}")

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(self._interval_s)
            self.flush()
