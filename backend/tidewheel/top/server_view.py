"""Values that `tidewheel top` shows, made from two pages of metrics.

A field's annotation holds the function that writes it as text, then what reads it: a method of `PageChange`, or a
function, and arguments. Rates are per second, over the last `watch.WINDOW_S`. None: not known, or not yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

from tidewheel import metrics
from tidewheel.engine.messages import RequestRow
from tidewheel.request import Priority
from tidewheel.top.figure_text import Bytes, Count, Name, Number, Rate, Seconds, Share, count
from tidewheel.top.metric_changes import PageChange, label_values

Line = TypeVar("Line", bound=msgspec.Struct)
TokenLine = TypeVar("TokenLine", "TenantLine", "LoraLine")
_BREAKER = ("closed", "half open", "open")


def read(cls: type[Line], change: PageChange, *, labels: dict[str, str] | None = None, **others: object) -> Line:
    """Make a line: read annotated fields from series with `labels`, take the rest from `others`."""
    readings = {name: reading for name, (_, *reading) in _annotations(cls).items() if reading}
    figures = {name: method(change, *given, **(labels or {})) for name, (method, *given) in readings.items()}
    return cls(**figures, **others)


def cells(line: msgspec.Struct) -> list[str]:
    """Return a line's fields as text, in their order, which is that of a table's columns."""
    return [write(getattr(line, name)) for name, (write, *_) in _annotations(type(line)).items()]


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
    traffic: Traffic
    classes: list[ClassLine]
    tenants: list[TenantLine]
    loras: list[LoraLine]  # adapters
    cache: CacheLine
    steps: StepLine
    errors: list[ErrorLine]
    gateway: GatewayLine | None = None
    gateway_problem: str = ""
    requests: list[RequestLine] = []  # the oldest
    num_sequences: int = 0  # unfinished, of all requests
    requests_note: str = ""  # why `requests` is empty
    ranks: list[RankLine] = []  # of engines of several processes


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
    use: Annotated[Share, _cache_use]  # share of the blocks
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
    busy: Annotated[Share, PageChange.highest, metrics.BUSY]  # share of the time
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
