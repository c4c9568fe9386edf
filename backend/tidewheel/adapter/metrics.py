"""Figures on Triton's `/metrics`.

Each call of a metric is a round trip (14 to 90 µs, measured), so only differences of totals are sent. Front ends
share series of equal name and labels, whose differences add up. Triton removes a family's metrics with its last
Python object, so each series keeps one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from tidewheel.adapter.engine_figures import ENGINE_COUNTERS, ENGINE_GAUGES, TENANT_COUNTERS, Labels
from tidewheel.engine.messages import EngineInfo
from tidewheel.frontend.request_figures import REJECTION_TAGS, FrontendStats, LatencyHistogram
from tidewheel.request import FinishReason
from tidewheel.stats import EngineStats

FLUSH_INTERVAL_S = 0.4


REQUEST_LATENCIES: tuple[tuple[str, str, Callable[[FrontendStats], LatencyHistogram]], ...] = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token", lambda s: s.time_to_first_token),
    ("vllm:inter_token_latency_seconds", "Token to token", lambda s: s.inter_token_latency),
    # The older name, which dashboards still use.
    ("vllm:time_per_output_token_seconds", "Token to token", lambda s: s.inter_token_latency),
    ("vllm:e2e_request_latency_seconds", "Arrival to last token", lambda s: s.e2e_latency),
    ("vllm:request_queue_time_seconds", "Arrival to first step", lambda s: s.queue_time),
    ("tidewheel_refusal_seconds", "Arrival to refusal", lambda s: s.refusal_time),
)


class Gauge:
    def __init__(self, family: Any, labels: Labels) -> None:
        self._metric = _for_good(family.Metric(labels=dict(labels)))
        self._family = family
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
        self._family = family
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


class Histogram:
    """Prometheus' `<name>_bucket`, `<name>_sum` and `<name>_count`: a Triton histogram takes one value a call.

    They are gauges, because Prometheus' Python parser adds `_total` to counter names.
    """

    def __init__(self, name: str, description: str, bounds: Sequence[float], labels: Labels) -> None:
        buckets = gauge_family(f"{name}_bucket", f"{description} (at most le)")
        edges = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        self._buckets = [Counter(buckets, {**labels, "le": edge}) for edge in edges]
        self._sum = Counter(gauge_family(f"{name}_sum", f"{description} (sum)"), labels)
        self._count = Counter(gauge_family(f"{name}_count", f"{description} (number)"), labels)

    def advance(self, counts: Sequence[int], total: float) -> None:
        """Advance to `counts` per bucket (not cumulative) and their sum `total`."""
        cumulative = 0
        for bucket, count in zip(self._buckets, counts, strict=True):
            cumulative += count
            bucket.advance(cumulative)
        self._sum.advance(total)
        self._count.advance(cumulative)


def _for_good(thing: Any) -> Any:
    """Keep the object to the end of the process, also while the interpreter ends.

    Triton 2.51 removes a family with its first object that ends, and crashes when another model uses it then.
    """
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
        # Triton makes its ORCA load headers from this family.
        blocks = gauge_family("nv_trt_llm_kv_cache_block_metrics", "KV cache blocks")
        names = {"model": labels["model"], "version": labels["version"]}
        self._max, self._used, self._tokens_per = (
            Gauge(blocks, {"kv_cache_block_type": kind, **names}) for kind in ("max", "used", "tokens_per")
        )

    def publish(self, stats: EngineStats) -> None:
        for of, gauge in self._gauges:
            gauge.set(of(stats))
        for of, counter in self._counters:
            counter.advance(of(stats))
        for of_tenant, by_tenant in self._by_tenant:
            by_tenant.advance({label: of_tenant(figures) for label, figures in stats.tenants.items()})
        self._max.set(stats.num_blocks)
        self._used.set(stats.num_blocks - stats.num_free_blocks)
        self._tokens_per.set(self._block_size)

    def follow(self, stats: EngineStats) -> None:
        """Note what the owner publishes, to continue there after a takeover."""
        for of, counter in self._counters:
            counter.follow(of(stats))
        for of_tenant, by_tenant in self._by_tenant:
            by_tenant.follow({label: of_tenant(figures) for label, figures in stats.tenants.items()})
        for gauge in (*(gauge for _, gauge in self._gauges), self._max, self._used, self._tokens_per):
            gauge.forget()


class RequestMetrics:
    def __init__(self, labels: Labels) -> None:
        self._received = Counter(counter_family("tidewheel_requests_received_total", "Requests"), labels)
        success = counter_family("vllm:request_success_total", "Finished requests")
        self._finished = CounterByLabel(success, labels, "finished_reason", [r for r in FinishReason if r != "error"])
        rejected = counter_family(
            "tidewheel_requests_rejected_total", "Requests refused before anything was computed"
        )
        self._rejected = CounterByLabel(rejected, labels, "tag", sorted(REJECTION_TAGS))
        failed = counter_family("tidewheel_requests_failed_total", "Accepted requests that an error ended")
        self._failed = CounterByLabel(failed, labels, "tag")
        self._prompt = Counter(counter_family("vllm:prompt_tokens_total", "Prompt tokens"), labels)
        self._generation = Counter(counter_family("vllm:generation_tokens_total", "Generated tokens"), labels)
        empty = FrontendStats()
        self._histograms = [
            (of, Histogram(name, description, of(empty).bounds, labels))
            for name, description, of in REQUEST_LATENCIES
        ]

    def publish(self, stats: FrontendStats, refused: Mapping[str, int]) -> None:
        """Publish figures. `refused`: requests that never reached the front end, by tag."""
        self._received.advance(stats.num_received + sum(refused.values()))
        self._finished.advance(stats.finished)
        self._failed.advance(stats.failed)
        self._prompt.advance(stats.num_prompt_tokens)
        self._generation.advance(stats.num_generation_tokens)
        for of, histogram in self._histograms:
            snapshot = of(stats)
            histogram.advance(snapshot.counts, snapshot.total)
        # Last, so that a visible refusal implies the others.
        self._rejected.advance({tag: stats.rejected.get(tag, 0) + refused.get(tag, 0) for tag in REJECTION_TAGS})


class MetricsPublisher:
    """Thread that calls `flush` every `interval_s` and at the end."""

    def __init__(self, flush: Callable[[], None], interval_s: float = FLUSH_INTERVAL_S) -> None:
        self._flush = flush
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        is_last, last_problem = False, ""
        while not is_last:
            is_last = self._stopped.wait(self._interval_s)
            try:
                self._flush()
            except Exception as error:
                if str(error) != last_problem:  # log once
                    last_problem = str(error)
                    pb_utils.Logger.log_error(f"metrics could not be published: {error}")
