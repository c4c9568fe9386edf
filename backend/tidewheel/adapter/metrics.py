"""Publication of the metrics of engine and requests on Triton's `/metrics`.

A call to Triton takes 20 to 60 µs, so only changes are sent. Front ends share the series of equal labels. A metric is
never deleted: other front ends would lose it, and server 2.51 would hang.
"""

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tidewheel import metrics
from tidewheel.batch import Float64Array
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import TAGS
from tidewheel.frontend.request_figures import REJECTION_TAGS, FrontendStats
from tidewheel.metrics import Metric
from tidewheel.request import FinishReason, Priority
from tidewheel.stats import EngineStats, Histogram

Labels = Mapping[str, str]

FLUSH_INTERVAL_S = 0.4
RENEWAL = 25  # flushes after which gauges are sent again: another front end may have cleared them
MAX_OBSERVATIONS = 32  # per histogram and flush: 80 a second
MAX_WAITING = 1024
MAX_RESTING = 1 << 16  # more, for a time without live requests
CLASSES = tuple(priority.name.lower() for priority in Priority)
_ROUNDING = 1e-6  # of sums of shares
_LABEL_VALUES: Mapping[str, Sequence[str]] = {
    metrics.FINISHED.name: [reason for reason in FinishReason if reason != "error"],
    metrics.REJECTED.name: sorted(REJECTION_TAGS),
    metrics.FAILED.name: sorted(TAGS),
}


class NumberSeries:
    """Gauge or counter, with a series per label value ("": no label). A total that shrinks counts from 0."""

    def __init__(self, metric: Metric, labels: Labels, values: Iterable[str] = ()) -> None:
        self._is_gauge = metric.kind == "gauge"
        self._family = make_family(metric)
        self._label = metric.label
        self._labels = labels
        self._series = functools.cache(self._open)
        self._last: dict[str, float] = {}
        self._num_advances = 0
        for value in values:
            self._series(str(value))  # for the cache, a member of an enumeration is another key

    def advance(self, numbers: Mapping[str, float], *, is_ours: bool = True) -> None:
        """Publish the metric's values, by label. Without `is_ours`, only note them: another front end publishes.

        A gauge's labels that are no longer among them get 0.
        """
        if self._is_gauge:
            numbers = {**dict.fromkeys(self._last, 0.0), **numbers}
        self._num_advances += 1
        is_renewal = self._num_advances % RENEWAL == 0
        for value, number in numbers.items():
            series, last = self._series(str(value)), self._last.get(value)
            if not self._is_gauge:
                growth = number if last is None or number < last else number - last
                if is_ours and growth > 0:
                    series.increment(growth)
            elif is_ours and (number != last or is_renewal):
                series.set(number)
            # A gauge of another front end is sent when it becomes ours.
            self._last[value] = number if is_ours or not self._is_gauge else math.nan

    def _open(self, value: str) -> Any:
        labels = {**self._labels, self._label: value} if self._label else dict(self._labels)
        return _keep(self._family.Metric(labels=labels))


class HistogramSeries:
    """Triton histogram that receives new values of a `Histogram`, each as its bucket's mean.

    At most `MAX_WAITING` values, of all buckets in proportion, wait for later flushes. More are sent when no request
    is live.
    """

    def __init__(self, metric: Metric, bounds: Sequence[float], labels: Labels) -> None:
        self._metric = _keep(make_family(metric).Metric(labels=dict(labels), buckets=list(bounds)))
        self._seen = Histogram(tuple(bounds))
        self._waiting, self._resting = (np.zeros((2, len(self._seen.counts))) for _ in range(2))  # counts, sums

    def advance(self, now: Histogram, *, is_ours: bool = True, has_time: bool = False) -> bool:
        """Send up to `MAX_OBSERVATIONS` new values; without `is_ours`, skip them. Return whether values are left."""
        if not is_ours:
            self._seen = now.copy()
            return False
        self._take(now)
        if has_time:
            self._resting = self._admit(self._resting)
        num_waiting = float(self._waiting[0].sum())
        if num_waiting < 1.0 - _ROUNDING:
            return False
        share = min(1.0, MAX_OBSERVATIONS / num_waiting)
        for bucket, count in enumerate(self._waiting[0].tolist()):
            self._observe(bucket, int(share * count + _ROUNDING))
        return share < 1.0 or bool(self._resting[0].sum() >= 1.0 - _ROUNDING)

    def _take(self, now: Histogram) -> None:
        seen = self._seen
        if now.counts == seen.counts:
            return
        if sum(now.counts) <= sum(seen.counts):  # of a restarted process
            seen = Histogram(now.bounds)
        self._seen = now.copy()
        self._resting += self._admit(np.array([now.counts, now.sums]) - np.array([seen.counts, seen.sums]))
        self._resting *= min(1.0, MAX_RESTING / max(self._resting[0].sum(), 1.0))

    def _admit(self, values: Float64Array) -> Float64Array:
        room = max(MAX_WAITING - self._waiting[0].sum(), 0.0)
        share = min(1.0, room / max(values[0].sum(), _ROUNDING))
        self._waiting += share * values
        rest: Float64Array = (1.0 - share) * values
        return rest

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


class SeriesTable:
    """Triton's series of a metric table. `source` names a metric's field of `figures`."""

    def __init__(self, table: Iterable[Metric], labels: Labels, figures: Any) -> None:
        self._numbers: list[tuple[Metric, NumberSeries]] = []
        self._histograms: list[tuple[str, HistogramSeries]] = []
        for metric in table:
            if metric.kind == "histogram":
                source = str(metric.source)
                self._histograms.append((source, HistogramSeries(metric, getattr(figures, source).bounds, labels)))
            else:
                self._numbers.append((metric, NumberSeries(metric, labels, _label_values(metric))))

    def publish(self, figures: Any, *, is_ours: bool = True, has_time: bool = False) -> bool:
        """Send new figures if `is_ours`. Return whether values are left. `has_time`: no request is live."""
        are_left = [
            series.advance(getattr(figures, name), is_ours=is_ours, has_time=has_time)
            for name, series in self._histograms
        ]
        for metric, series in self._numbers:
            series.advance(_read(metric, figures), is_ours=is_ours)
        return any(are_left)


class EngineMetrics:
    """Metrics of one engine, published by the front end that owns the engine."""

    def __init__(self, info: EngineInfo, labels: Labels) -> None:
        table = (*metrics.select("engine"), *metrics.select("tenant"), *metrics.select("lora"))
        self._table = SeriesTable(table, labels, EngineStats())
        self._block_size = info.block_size
        self._blocks = NumberSeries(metrics.CACHE_BLOCKS, {name: labels[name] for name in ("model", "version")})
        sizes = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}  # on a CPU, too
        self._config = NumberSeries(metrics.CACHE_CONFIG, {**labels, **sizes})
        self.ready = NumberSeries(metrics.ENGINE_READY, labels)
        self.restarts = NumberSeries(metrics.ENGINE_RESTARTS, labels)

    def publish(self, stats: EngineStats, *, is_ours: bool = True, has_time: bool = False) -> bool:
        """Publish as `SeriesTable.publish`; without `is_ours`, note the figures for a takeover."""
        has_cache = stats.num_blocks > 0
        used = stats.num_blocks - stats.num_free_blocks
        blocks = {"max": stats.num_blocks, "used": used, "tokens_per": has_cache * self._block_size}
        self._blocks.advance(blocks, is_ours=is_ours)
        self._config.advance({"": float(has_cache)}, is_ours=is_ours)
        return self._table.publish(stats, is_ours=is_ours, has_time=has_time)

    def clear(self) -> None:
        """Set the gauges to 0, since Triton would keep the last values."""
        self.publish(EngineStats())
        self.ready.advance({"": 0.0})


def request_metrics(labels: Labels, stats: FrontendStats) -> SeriesTable:
    """Return the series of requests. Refusals are sent last: a page that shows them shows the rest."""
    return SeriesTable(sorted(metrics.select("requests"), key=lambda row: row is metrics.REJECTED), labels, stats)


class MetricsPublisher:
    """Thread that calls `publish` every `FLUSH_INTERVAL_S`, in `close`, and again at once when it returns true."""

    def __init__(self, publish: Callable[[], bool]) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._last_problem = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def flush(self) -> bool:
        """Publish now. Return whether values are left."""
        with self._lock:
            try:
                return self._publish()
            except Exception as error:
                if str(error) != self._last_problem:
                    self._last_problem = str(error)
                    pb_utils.Logger.log_error(f"metrics could not be published: {error}")
                return False

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = is_behind = False
        while not is_last:
            is_last = self._stopped.wait(0.0 if is_behind else FLUSH_INTERVAL_S)
            is_behind = self.flush()


def _label_values(metric: Metric) -> Iterable[str]:
    """Return label values that start at 0, because Prometheus sees no increase in a new series."""
    if not metric.label or metric.label == "class":
        return CLASSES if metric.label else ("",)
    return metric.source if isinstance(metric.source, Mapping) else _LABEL_VALUES.get(metric.name, ())


def _read(metric: Metric, figures: Any) -> Mapping[str, float]:
    source = metric.source
    if isinstance(source, Mapping):
        return {value: getattr(figures, field) for value, field in source.items()}
    if metric.owner in ("tenant", "lora"):
        named = figures.tenants if metric.owner == "tenant" else figures.loras
        return {name: getattr(sums, source) for name, sums in named.items()}
    found = getattr(figures, source)
    if isinstance(found, list):
        return dict(zip(CLASSES, found, strict=True))
    return found if isinstance(found, Mapping) else {"": found}


def make_family(metric: Metric) -> Any:
    kind = getattr(pb_utils.MetricFamily, metric.kind.upper())
    return _keep(pb_utils.MetricFamily(name=metric.name, description=metric.help, kind=kind))


def _keep(thing: Any) -> Any:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing
