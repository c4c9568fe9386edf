"""Publication of the metrics of engine and requests on Triton's `/metrics`.

A call is a round trip (20 to 60 µs, measured), so only differences of totals are sent. Front ends share series of
equal labels, whose differences add up. A metric is never deleted: the server would remove the series under other
front ends (2.51 then hangs).
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tidewheel import metrics
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import TAGS
from tidewheel.frontend.request_figures import REJECTION_TAGS, FrontendStats
from tidewheel.metrics import Metric
from tidewheel.request import FinishReason, Priority
from tidewheel.stats import STEP_BOUNDS, EngineStats, Histogram

Labels = Mapping[str, str]

FLUSH_INTERVAL_S = 0.4
RENEWAL = 25  # flushes after which gauges are sent again: another front end may have cleared them
MAX_OBSERVATIONS = 64  # per histogram and flush: 160 a second
MAX_WAITING = 1024  # values of a histogram, for later flushes
MAX_RESTING = 1 << 16  # more, for a time without live requests
CLASSES = tuple(priority.name.lower() for priority in Priority)
_ROUNDING = 1e-6  # of sums of shares


class GaugeSeries:
    def __init__(self, family: Any, labels: Labels) -> None:
        self._metric = _keep(family.Metric(labels=dict(labels)))
        self._value: float | None = None

    def set(self, value: float) -> None:
        if value != self._value:
            self._metric.set(value)
            self._value = value

    def forget(self) -> None:
        """Send the next value in any case."""
        self._value = None


class CounterSeries:
    """Growing total. A smaller total comes from a restarted process."""

    def __init__(self, family: Any, labels: Labels) -> None:
        self._metric = _keep(family.Metric(labels=dict(labels)))
        self._total = 0.0

    def advance(self, total: float) -> None:
        difference = total - self._total if total >= self._total else total
        if difference > 0:
            self._metric.increment(difference)
        self._total = total

    def follow(self, total: float) -> None:
        """Skip what another front end has published."""
        self._total = total


class LabelledCounters:
    """Counters that differ in one label."""

    def __init__(self, metric: Metric, labels: Labels, values: Sequence[str] = ()) -> None:
        self._family = make_family(metric)
        self._label = metric.label
        self._labels = labels
        self._counters: dict[str, CounterSeries] = {}
        for value in values:
            self._counter(value)

    def advance(self, totals: Mapping[str, float]) -> None:
        for value, total in totals.items():
            self._counter(value).advance(total)

    def follow(self, totals: Mapping[str, float]) -> None:
        for value, total in totals.items():
            self._counter(value).follow(total)

    def _counter(self, value: str) -> CounterSeries:
        if value not in self._counters:
            self._counters[value] = CounterSeries(self._family, {**self._labels, self._label: value})
        return self._counters[value]


class HistogramSeries:
    """Histogram that is sent the growth of a `Histogram` as means of its buckets' unsent values.

    At most `MAX_WAITING` values wait for later flushes, an equal share of each bucket. The others rest until no
    request is live.
    """

    def __init__(self, metric: Metric, bounds: Sequence[float], labels: Labels) -> None:
        self._metric = _keep(make_family(metric).Metric(labels=dict(labels), buckets=list(bounds)))
        self._seen = Histogram(tuple(bounds))
        self._waiting, self._resting = (np.zeros((2, len(self._seen.counts))) for _ in range(2))  # counts, sums

    def advance(self, now: Histogram, *, has_time: bool = False) -> bool:
        """Return whether values are left. `has_time`: no request is live."""
        self._take(now)
        if has_time:
            self._wake()
        num_waiting = self._num_waiting
        if num_waiting < 1.0 - _ROUNDING:
            return False
        share = min(1.0, MAX_OBSERVATIONS / num_waiting)
        for bucket, count in enumerate(self._waiting[0].tolist()):
            self._observe(bucket, int(share * count + _ROUNDING))
        return share < 1.0 or bool(self._resting[0].sum() >= 1.0 - _ROUNDING)

    def follow(self, now: Histogram) -> None:
        """Skip what another front end has published."""
        self._seen = now.copy()

    def _take(self, now: Histogram) -> None:
        seen = self._seen
        if now.counts == seen.counts:
            return
        if sum(now.counts) <= sum(seen.counts):  # of a restarted process
            seen = Histogram(now.bounds)
        self.follow(now)
        new = np.array([now.counts, now.sums]) - [seen.counts, seen.sums]
        share = min(1.0, self._room / max(new[0].sum(), 1.0))
        self._waiting += share * new
        if share < 1.0:
            self._resting += (1.0 - share) * new
            self._resting *= min(1.0, MAX_RESTING / self._resting[0].sum())

    def _wake(self) -> None:
        num_resting = float(self._resting[0].sum())
        if num_resting:
            share = min(1.0, self._room / num_resting)
            self._waiting += share * self._resting
            self._resting *= 1.0 - share

    @property
    def _num_waiting(self) -> float:
        return float(self._waiting[0].sum())

    @property
    def _room(self) -> float:
        return max(MAX_WAITING - self._num_waiting, 0.0)

    def _observe(self, bucket: int, num_values: int) -> None:
        if not num_values:
            return
        bounds = self._seen.bounds
        count, total = self._waiting[:, bucket].tolist()
        mean = total / count
        if bucket < len(bounds):
            mean = min(mean, bounds[bucket])
        if bucket:
            mean = max(mean, math.nextafter(bounds[bucket - 1], math.inf))
        self._waiting[:, bucket] -= num_values, num_values * total / count
        for _ in range(num_values):
            self._metric.observe(mean)


class EngineMetrics:
    """Metrics of an engine, published by its owner."""

    def __init__(self, info: EngineInfo, labels: Labels) -> None:
        self._block_size = info.block_size
        self._gauges = [
            (read, GaugeSeries(family, {**labels, **more}))
            for read, family, more in _series(metrics.select("engine", "gauge"))
        ]
        self._counters = [
            (read, CounterSeries(family, {**labels, **more}))
            for read, family, more in _series(metrics.select("engine", "counter"))
        ]
        self._by_tenant = [
            (attrgetter(str(metric.source)), LabelledCounters(metric, labels))
            for metric in metrics.select("tenant", "counter")
        ]
        blocks, model = make_family(metrics.CACHE_BLOCKS), {name: labels[name] for name in ("model", "version")}
        self._max, self._used, self._tokens_per = (
            GaugeSeries(blocks, {metrics.CACHE_BLOCKS.label: kind, **model}) for kind in ("max", "used", "tokens_per")
        )
        sizes = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}  # on a CPU, too
        self._config = GaugeSeries(make_family(metrics.CACHE_CONFIG), {**labels, **sizes})
        self._ready = GaugeSeries(make_family(metrics.ENGINE_READY), labels)
        self._restarts = CounterSeries(make_family(metrics.ENGINE_RESTARTS), labels)
        self._step_tokens = HistogramSeries(metrics.STEP_TOKENS, STEP_BOUNDS, labels)
        self._num_published = 0

    def publish_ready(self, is_ready: bool | None) -> None:
        """Publish readiness; None: another front end does."""
        if is_ready is None:
            self._ready.forget()
        else:
            self._ready.set(float(is_ready))

    def publish_restarts(self, count: int, *, is_owner: bool) -> None:
        """Publish the count, or skip what the owner publishes."""
        (self._restarts.advance if is_owner else self._restarts.follow)(count)

    def publish(self, stats: EngineStats, *, has_time: bool = False) -> bool:
        """Return whether values are left. `has_time`: no request is live."""
        self._num_published += 1
        if self._num_published % RENEWAL == 0:
            self._forget()
        for read, gauge in self._gauges:
            gauge.set(read(stats))
        for read, counter in self._counters:
            counter.advance(read(stats))
        for read, by_tenant in self._by_tenant:
            by_tenant.advance({tenant: read(figures) for tenant, figures in stats.tenants.items()})
        self._max.set(stats.num_blocks)
        self._used.set(stats.num_used_blocks)
        self._tokens_per.set(self._block_size)
        self._config.set(1.0)
        return self._step_tokens.advance(stats.step_tokens, has_time=has_time)

    def follow(self, stats: EngineStats) -> None:
        """Skip what the owner publishes, for a takeover."""
        for read, counter in self._counters:
            counter.follow(read(stats))
        for read, by_tenant in self._by_tenant:
            by_tenant.follow({tenant: read(figures) for tenant, figures in stats.tenants.items()})
        self._step_tokens.follow(stats.step_tokens)
        self._forget()

    def clear(self) -> None:
        """Show an idle engine: the last values would stay."""
        idle = EngineStats()
        for read, gauge in self._gauges:
            gauge.set(read(idle))
        for gauge in self._others():
            gauge.set(0.0)

    def _forget(self) -> None:
        for gauge in (*(gauge for _, gauge in self._gauges), *self._others()):
            gauge.forget()

    def _others(self) -> tuple[GaugeSeries, ...]:
        return self._max, self._used, self._tokens_per, self._config, self._ready


class RequestMetrics:
    def __init__(self, labels: Labels, stats: FrontendStats) -> None:
        """Publish what grows beyond `stats`."""
        reasons = [reason for reason in FinishReason if reason != "error"]
        self._received, self._prompt, self._generation = (
            CounterSeries(make_family(metric), labels)
            for metric in (metrics.RECEIVED, metrics.PROMPT_TOKENS, metrics.GENERATION_TOKENS)
        )
        self._finished = LabelledCounters(metrics.FINISHED, labels, reasons)
        self._rejected = LabelledCounters(metrics.REJECTED, labels, sorted(REJECTION_TAGS))
        self._failed = LabelledCounters(metrics.FAILED, labels, sorted(TAGS))
        self._answered = LabelledCounters(metrics.ANSWERED, labels, CLASSES)
        self._in_time = LabelledCounters(metrics.IN_TIME, labels, CLASSES)
        reads = [(attrgetter(str(metric.source)), metric) for metric in metrics.select("requests", "histogram")]
        self._histograms = [(read, HistogramSeries(metric, read(stats).bounds, labels)) for read, metric in reads]

    def publish(self, stats: FrontendStats, refused: Mapping[str, int], *, has_time: bool = False) -> bool:
        """Return whether values are left. `refused`: requests by tag that never reached the front end."""
        self._received.advance(stats.num_received + sum(refused.values()))
        self._finished.advance(stats.finished)
        self._failed.advance(stats.failed)
        self._prompt.advance(stats.num_prompt_tokens)
        self._generation.advance(stats.num_generation_tokens)
        are_left = [histogram.advance(read(stats), has_time=has_time) for read, histogram in self._histograms]
        self._answered.advance({priority.name.lower(): count for priority, count in stats.answered.items()})
        self._in_time.advance({priority.name.lower(): count for priority, count in stats.in_time.items()})
        # Last, so that a visible refusal implies the others.
        self._rejected.advance({tag: stats.rejected.get(tag, 0) + refused.get(tag, 0) for tag in REJECTION_TAGS})
        return any(are_left)


class MetricsPublisher:
    """Thread that calls `publish` every `interval_s`, at the end, and at once after it returned True."""

    def __init__(self, publish: Callable[[], bool], interval_s: float = FLUSH_INTERVAL_S) -> None:
        self._publish = publish
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._last_problem = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def flush(self) -> bool:
        """Return whether to publish again at once."""
        with self._lock:
            try:
                return self._publish()
            except Exception as error:
                if str(error) != self._last_problem:  # log once
                    self._last_problem = str(error)
                    pb_utils.Logger.log_error(f"metrics could not be published: {error}")
                return False

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = is_behind = False
        while not is_last:
            is_last = self._stopped.wait(0.0 if is_behind else self._interval_s)
            is_behind = self.flush()


Series = tuple[Callable[[Any], float], Any, Labels]


def _series(table: Sequence[Metric]) -> list[Series]:
    found: list[Series] = []
    for metric in table:
        family, source = make_family(metric), metric.source
        if isinstance(source, Mapping):
            found += [(attrgetter(field), family, {metric.label: value}) for value, field in source.items()]
        elif metric.label:
            found += [(_element(source, index), family, {metric.label: name}) for index, name in enumerate(CLASSES)]
        else:
            found.append((attrgetter(source), family, {}))
    return found


def _element(field: str, index: int) -> Callable[[Any], float]:
    return lambda stats: float(getattr(stats, field)[index])


def make_family(metric: Metric) -> Any:
    kind = getattr(pb_utils.MetricFamily, metric.kind.upper())
    return _keep(pb_utils.MetricFamily(name=metric.name, description=metric.help, kind=kind))


def _keep(thing: Any) -> Any:
    """Keep the object while the interpreter ends, too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing
