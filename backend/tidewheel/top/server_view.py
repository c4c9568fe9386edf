"""Values that `tidewheel top` shows, made from two pages of metrics.

A field's annotation holds the function that writes it as text, then what reads it: a method of `PageChange`, or a
function, and arguments. Rates are per second, over the last `watch.WINDOW_S`. None: not known, or not yet.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import msgspec

from tidewheel import metrics
from tidewheel.bench.tables import NOTHING, number
from tidewheel.engine.messages import RequestRow
from tidewheel.errors import printable
from tidewheel.request import Priority
from tidewheel.settings import shown_bytes
from tidewheel_client.server_pages import Figures

Line = TypeVar("Line", bound=msgspec.Struct)
TokenLine = TypeVar("TokenLine", "TenantLine", "LoraLine")
_MODEL_LABELS = ("model", "model_name")
_BREAKER = ("closed", "half open", "open")
_FULL, _EMPTY, _BAR_CHARS = "█", "░", 8


def figures_of_model(figures: Figures, model: str) -> Figures:
    """Return the metrics of a model, and metrics without a model."""
    series = (one for name in figures.names for one in figures.samples(name))
    models = ((one, [one.labels[label] for label in _MODEL_LABELS if label in one.labels]) for one in series)
    return Figures(one for one, named in models if not named or model in named)


def label_values(figures: Figures, metric: metrics.Metric, label: str) -> list[str]:
    return sorted({one.labels[label] for one in figures.samples(metric.name) if label in one.labels})


class PageChange(NamedTuple):
    before: Figures
    after: Figures
    seconds: float  # between both

    def total(self, metric: metrics.Metric, **labels: str) -> float | None:
        """Return the sum of a metric over the series with these labels, or None without any."""
        return _total(self.after, metric, labels)

    def total_or_zero(self, metric: metrics.Metric, **labels: str) -> float:
        return self.total(metric, **labels) or 0.0

    def highest(self, metric: metrics.Metric, **labels: str) -> float | None:
        return max((one.value for one in self.after.samples(metric.name, **labels)), default=None)

    def growth(self, metric: metrics.Metric, **labels: str) -> float | None:
        now, then = self.total(metric, **labels), _total(self.before, metric, labels) or 0.0
        return now - then if now is not None and now >= then else now  # it has begun anew

    def rate(self, metric: metrics.Metric, **labels: str) -> float | None:
        """Return a counter's growth per second; None without the counter or a second page."""
        growth = self.growth(metric, **labels)
        return None if growth is None or self.seconds <= 0 else growth / self.seconds

    def ratio(self, part: metrics.Metric, whole: metrics.Metric, **labels: str) -> float | None:
        """Return the growth of `part` over that of `whole`; None if either is unknown or 0."""
        grown, by = self.growth(part, **labels), self.growth(whole, **labels)
        return grown / by if grown is not None and by else None

    def quantile(self, metric: metrics.Metric, share: float) -> float | None:
        """Return the quantile of values observed between the pages, None without values.

        Values are interpolated within a bucket; in the last bucket the quantile is its lower bound.
        """
        then, now = _buckets(self.before, metric), _buckets(self.after, metric)
        counts = {bound: count - then.get(bound, 0.0) for bound, count in now.items()}
        if min(counts.values(), default=0.0) < 0:  # begun anew
            counts = now
        wanted = share * counts.get(math.inf, 0.0)
        for (low, below), (high, count) in itertools.pairwise([(0.0, 0.0), *counts.items()]):
            if count >= wanted and count > below:
                return low if math.isinf(high) else low + (high - low) * (wanted - below) / (count - below)
        return None


def _total(figures: Figures, metric: metrics.Metric, labels: dict[str, str]) -> float | None:
    values = [one.value for one in figures.samples(metric.name, **labels)]
    return sum(values) if values else None


def _buckets(figures: Figures, metric: metrics.Metric) -> dict[float, float]:
    """Return the cumulative counts of a histogram by upper bound, ascending."""
    counts: dict[float, float] = {}
    for one in figures.samples(f"{metric.name}_bucket"):
        bound = float(one.labels["le"])
        counts[bound] = counts.get(bound, 0.0) + one.value
    return dict(sorted(counts.items()))


def name(text: str) -> str:
    return printable(text) or NOTHING


def count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    return NOTHING if value is None else f"{number(value)}/s" if value else "0/s"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def size(num_bytes: int | None) -> str:
    return NOTHING if num_bytes is None else shown_bytes(num_bytes)


def bar(share: float | None) -> str:
    if share is None:
        return NOTHING
    full = round(min(max(share, 0.0), 1.0) * _BAR_CHARS)
    return f"{_FULL * full}{_EMPTY * (_BAR_CHARS - full)} {percent(share)}"


Name = Annotated[str, name]
Count = Annotated[float | None, count]
Number = Annotated[float | None, number]
Rate = Annotated[float | None, rate]
Share = Annotated[float | None, percent]
Bar = Annotated[float | None, bar]
Seconds = Annotated[float | None, duration]
Bytes = Annotated[int | None, size]


def read(cls: type[Line], change: PageChange, *, labels: dict[str, str] | None = None, **others: object) -> Line:
    """Make a line: read annotated fields from series with `labels`, take the rest from `others`."""
    readings = {name: reading for name, (_, *reading) in _annotations(cls).items() if reading}
    figures = {name: method(change, *given, **(labels or {})) for name, (method, *given) in readings.items()}
    return cls(**figures, **others)


def texts(line: msgspec.Struct) -> dict[str, str]:
    """Return a line's fields as text by name, in their order, which is that of a table's columns."""
    return {name: write(getattr(line, name)) for name, (write, *_) in _annotations(type(line)).items()}


@cache
def _annotations(cls: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint.__metadata__ for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _cache_blocks(change: PageChange, kind: str) -> float | None:
    return change.total(metrics.CACHE_BLOCKS, kv_cache_block_type=kind)


def _cache_use(change: PageChange) -> float | None:
    used, most = _cache_blocks(change, "used"), _cache_blocks(change, "max")
    return used / most if used is not None and most else None


def _breaker(change: PageChange) -> str:
    state = change.highest(metrics.BREAKER)
    return "" if state is None else _BREAKER[int(state)]


class ServerView(msgspec.Struct, kw_only=True):
    server: str  # address of the metrics
    models: list[str]
    is_ready: bool | None  # None: /ready does not answer
    state: str
    reason: str
    summary: str = ""  # in a sentence
    traffic: "Traffic"
    classes: "list[ClassLine]"
    tenants: "list[TenantLine]"
    loras: "list[LoraLine]"  # adapters
    cache: "CacheLine"
    steps: "StepLine"
    errors: "list[ErrorLine]"
    gateway: "GatewayLine | None" = None
    gateway_problem: str = ""
    requests: "list[RequestLine]" = []  # the oldest
    num_sequences: int = 0  # unfinished, of all requests
    requests_note: str = ""  # why `requests` is empty
    ranks: "list[RankLine]" = []  # of engines of several processes


class Traffic(msgspec.Struct, kw_only=True):
    running: Annotated[Count, PageChange.total, metrics.RUNNING]
    waiting: Annotated[Count, PageChange.total, metrics.WAITING]
    received_rate: Annotated[Rate, PageChange.rate, metrics.RECEIVED]
    finished_rate: Annotated[Rate, PageChange.rate, metrics.FINISHED]
    refused_rate: Annotated[Rate, PageChange.rate, metrics.REJECTED]
    rate_limited_rate: Annotated[Rate, PageChange.rate, metrics.RATE_LIMITED]  # by a tenant's own rates
    failed_rate: Annotated[Rate, PageChange.rate, metrics.FAILED]
    prompt_tokens_rate: Annotated[Rate, PageChange.rate, metrics.PROMPT_TOKENS]
    output_tokens_rate: Annotated[Rate, PageChange.rate, metrics.GENERATION_TOKENS]
    first_token_p50_s: Annotated[Seconds, PageChange.quantile, metrics.TIME_TO_FIRST_TOKEN, 0.5]
    first_token_p95_s: Annotated[Seconds, PageChange.quantile, metrics.TIME_TO_FIRST_TOKEN, 0.95]
    inter_token_p50_s: Annotated[Seconds, PageChange.quantile, metrics.INTER_TOKEN_LATENCY, 0.5]
    inter_token_p95_s: Annotated[Seconds, PageChange.quantile, metrics.INTER_TOKEN_LATENCY, 0.95]
    queue_p95_s: Annotated[Seconds, PageChange.quantile, metrics.QUEUE_TIME, 0.95]
    in_time: Annotated[Share, PageChange.ratio, metrics.IN_TIME, metrics.ANSWERED]  # share of the answers


class ClassLine(msgspec.Struct, kw_only=True):
    name: Name
    running: Annotated[int | None, count]  # of the requests that are listed
    waiting: Annotated[Count, PageChange.total, metrics.WAITING_BY_CLASS]
    oldest_wait_s: Annotated[Seconds, PageChange.highest, metrics.OLDEST_WAIT]  # of waiting requests
    longest_wait_s: Annotated[Seconds, PageChange.highest, metrics.LONGEST_WAIT]  # of started requests
    started_rate: Annotated[Rate, PageChange.rate, metrics.STARTED]
    shed: Annotated[Count, PageChange.total, metrics.SHED]  # refused by the breaker
    evicted: Annotated[Count, PageChange.total, metrics.EVICTED]  # displaced by a better class
    in_time: Annotated[Share, PageChange.ratio, metrics.IN_TIME, metrics.ANSWERED]  # share of the answers
    objectives: Annotated[Share, PageChange.ratio, metrics.OBJECTIVES_MET, metrics.OBJECTIVES]  # share that was met


class TenantLine(msgspec.Struct, kw_only=True):
    name: Name
    requests_rate: Annotated[Rate, PageChange.rate, metrics.TENANT_REQUESTS]
    rejected_rate: Annotated[Rate, PageChange.rate, metrics.TENANT_REJECTED]
    mean_queue_s: Annotated[Seconds, PageChange.ratio, metrics.TENANT_QUEUE_SECONDS, metrics.TENANT_STARTED]
    prompt_tokens_rate: Annotated[Rate, PageChange.rate, metrics.TENANT_PROMPT_TOKENS]
    output_tokens_rate: Annotated[Rate, PageChange.rate, metrics.TENANT_GENERATION_TOKENS]
    output_tokens: Annotated[Count, PageChange.total, metrics.TENANT_GENERATION_TOKENS]
    objectives: Annotated[Share, PageChange.ratio, metrics.TENANT_OBJECTIVES_MET, metrics.TENANT_OBJECTIVES]


class LoraLine(msgspec.Struct, kw_only=True):
    name: Name
    running: Annotated[Count, PageChange.total, metrics.LORA_RUNNING]
    waiting: Annotated[Count, PageChange.total, metrics.LORA_WAITING]
    requests_rate: Annotated[Rate, PageChange.rate, metrics.LORA_REQUESTS]
    prompt_tokens_rate: Annotated[Rate, PageChange.rate, metrics.LORA_PROMPT_TOKENS]
    output_tokens_rate: Annotated[Rate, PageChange.rate, metrics.LORA_GENERATION_TOKENS]
    output_tokens: Annotated[Count, PageChange.total, metrics.LORA_GENERATION_TOKENS]


class CacheLine(msgspec.Struct, kw_only=True):
    use: Annotated[Bar, _cache_use]  # share of the blocks
    num_blocks: Annotated[Count, _cache_blocks, "max"]
    cached_blocks: Annotated[Count, PageChange.total, metrics.BLOCKS_CACHED]
    hit_rate: Annotated[Share, PageChange.ratio, metrics.HIT_TOKENS, metrics.QUERIED_TOKENS]  # of those that enter
    sessions: Annotated[Count, PageChange.total, metrics.SESSIONS]
    session_blocks: Annotated[Count, PageChange.total, metrics.SESSION_BLOCKS]
    host_blocks: Annotated[Count, PageChange.total, metrics.HOST_BLOCKS]
    host_blocks_free: Annotated[Count, PageChange.total, metrics.HOST_BLOCKS_FREE]


class StepLine(msgspec.Struct, kw_only=True):
    rate: Annotated[Rate, PageChange.rate, metrics.STEPS]
    tokens_rate: Annotated[Rate, PageChange.rate, metrics.SCHEDULED_TOKENS]  # computed
    tokens_per_step: Annotated[Number, PageChange.ratio, metrics.SCHEDULED_TOKENS, metrics.STEPS]
    seconds_per_step: Annotated[Seconds, PageChange.ratio, metrics.STEP_SECONDS, metrics.STEPS]
    busy: Annotated[Bar, PageChange.highest, metrics.BUSY]  # share of the time
    accepted_drafts: Annotated[Share, PageChange.ratio, metrics.ACCEPTED_DRAFT_TOKENS, metrics.DRAFT_TOKENS]
    accepted_per_step: Annotated[Number, PageChange.ratio, metrics.ACCEPTED_DRAFT_TOKENS, metrics.DRAFTS]
    token_budget: Annotated[Count, PageChange.total, metrics.TOKEN_BUDGET]
    max_num_seqs: Annotated[Count, PageChange.total, metrics.MAX_NUM_SEQS]
    preemptions: Annotated[Count, PageChange.total, metrics.PREEMPTIONS]
    preemptions_rate: Annotated[Rate, PageChange.rate, metrics.PREEMPTIONS]
    restarts: Annotated[Count, PageChange.total, metrics.ENGINE_RESTARTS]  # of the engine
    breaker: Annotated[Name, _breaker]  # empty: unknown


class ErrorLine(msgspec.Struct, kw_only=True):
    """Number of errors by tag (`docs/errors.md`)."""

    tag: Name
    refused: Annotated[float, count, PageChange.total_or_zero, metrics.REJECTED]  # before anything was computed
    refused_rate: Annotated[Rate, PageChange.rate, metrics.REJECTED]
    failed: Annotated[float, count, PageChange.total_or_zero, metrics.FAILED]  # afterwards
    failed_rate: Annotated[Rate, PageChange.rate, metrics.FAILED]
    gateway: Annotated[float, count]  # errors of the gateway, the server's among them


class GatewayLine(msgspec.Struct, kw_only=True):
    requests_rate: Annotated[Rate, PageChange.rate, metrics.GATEWAY_REQUESTS]
    open_requests: Annotated[Count, PageChange.total, metrics.GATEWAY_OPEN]
    hang_ups: Annotated[Count, PageChange.total, metrics.GATEWAY_HANG_UPS]
    moved: Annotated[Count, PageChange.total, metrics.GATEWAY_MOVED]


class RequestLine(RequestRow, frozen=True, array_like=False, kw_only=True):
    """Unfinished request, identified by `engine` and `number`."""

    engine: str  # folder of its engine
    engine_pid: int
    tokens_rate: float | None  # since the first token


class RankLine(msgspec.Struct, kw_only=True):
    model: Name
    rank: Annotated[int, count]
    device: Name
    memory_bytes: Bytes = None  # of the host
    busy: Share = None  # cores
    pid: Annotated[int, str]


def classes(change: PageChange, requests: Sequence[RequestLine] | None) -> list[ClassLine]:
    """Return a line for each class. `running` counts its running `requests`; None if they are not known."""
    running = None if requests is None else Counter(one.priority for one in requests if one.state == "running")
    return [
        read(ClassLine, change, labels={"class": name}, name=name, running=None if running is None else running[name])
        for name in (priority.name.lower() for priority in Priority)
    ]


def busiest(change: PageChange, cls: type[TokenLine], metric: metrics.Metric, label: str) -> list[TokenLine]:
    """Return a line for each tenant or adapter that is a value of the metric's label."""
    lines = (read(cls, change, labels={label: name}, name=name) for name in label_values(change.after, metric, label))
    return sorted(lines, key=lambda one: -(one.output_tokens or 0.0))


def errors(change: PageChange, gateway: PageChange) -> list[ErrorLine]:
    """Return a line per error tag that occurred, the most frequent first."""
    tags = {tag for metric in (metrics.REJECTED, metrics.FAILED) for tag in label_values(change.after, metric, "tag")}
    tags.update(label_values(gateway.after, metrics.GATEWAY_ERRORS, "tag"))
    at_gateway = {tag: gateway.total_or_zero(metrics.GATEWAY_ERRORS, tag=tag) for tag in sorted(tags)}
    lines = [read(ErrorLine, change, labels={"tag": tag}, tag=tag, gateway=n) for tag, n in at_gateway.items()]
    seen = [one for one in lines if one.refused or one.failed or one.gateway]
    return sorted(seen, key=lambda one: -max(one.refused + one.failed, one.gateway))
