"""Figures of engine and requests, published on Triton's `/metrics`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

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
from tidewheel.adapter.metric_series import (
    Counter,
    CounterByLabel,
    Gauge,
    HistogramSeries,
    counter_family,
    gauge_family,
)
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import TAGS
from tidewheel.frontend.request_figures import REJECTION_TAGS, FrontendStats
from tidewheel.request import FinishReason, Priority
from tidewheel.stats import STEP_BOUNDS, EngineStats

FLUSH_INTERVAL_S = 0.4
RENEWAL = 25  # flushes after which gauges are sent again


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

    def publish(self, stats: EngineStats, *, has_time: bool = False) -> bool:
        """Return whether figures are left for a time without live requests."""
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
        return self._step_tokens.advance(stats.step_tokens, has_time=has_time)

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

    def publish(self, stats: FrontendStats, refused: Mapping[str, int], *, has_time: bool = False) -> bool:
        """Publish figures, with `refused` requests that never reached the front end, by tag.

        Return whether some are left for a time without live requests.
        """
        self._received.advance(stats.num_received + sum(refused.values()))
        self._finished.advance(stats.finished)
        self._failed.advance(stats.failed)
        self._prompt.advance(stats.num_prompt_tokens)
        self._generation.advance(stats.num_generation_tokens)
        are_left = [histogram.advance(of(stats), has_time=has_time) for of, histogram in self._histograms]
        self._answered.advance(_by_class(stats.answered))
        self._in_time.advance(_by_class(stats.in_time))
        # Last, so that a visible refusal implies the others.
        self._rejected.advance({tag: stats.rejected.get(tag, 0) + refused.get(tag, 0) for tag in REJECTION_TAGS})
        return any(are_left)


def _by_class(counts: Mapping[Priority, int]) -> dict[str, float]:
    return {priority.name.lower(): count for priority, count in counts.items()}


class MetricsPublisher:
    """Thread that calls `publish` every `interval_s` and at the end, and again at once if it returns True.

    One call at a time.
    """

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
