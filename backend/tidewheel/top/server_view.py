"""Values that `tidewheel top` shows in the terminal, by `--once` and by `--json`, made from two pages of metrics.

Rates are per second, over the last `watch.WINDOW_S`. None is a value that the server does not show, or not yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from tidewheel import metrics
from tidewheel.request import Priority
from tidewheel.top.metric_changes import MetricsPage, PageChange

_BREAKER = ("closed", "half open", "open")
_CLASSES = tuple(priority.name.lower() for priority in Priority)


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
    cache: CacheLine
    steps: StepLine
    errors: list[ErrorLine]
    gateway: GatewayLine | None = None
    gateway_problem: str = ""
    requests: list[RequestLine] = []  # the oldest
    num_sequences: int = 0  # unfinished, of all requests
    requests_note: str = ""  # why `requests` is empty


class Traffic(msgspec.Struct, kw_only=True):
    running: float | None
    waiting: float | None
    received_rate: float | None
    finished_rate: float | None
    refused_rate: float | None
    rate_limited_rate: float | None  # by a tenant's own rates
    failed_rate: float | None
    prompt_tokens_rate: float | None
    output_tokens_rate: float | None
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    inter_token_p50_s: float | None
    inter_token_p95_s: float | None
    queue_p95_s: float | None
    in_time: float | None  # share of the answers


class ClassLine(msgspec.Struct, kw_only=True):
    name: str
    running: int | None  # of the requests that are listed
    waiting: float | None
    oldest_wait_s: float | None  # of waiting requests
    longest_wait_s: float | None  # of started requests
    started_rate: float | None
    shed: float | None  # refused by the breaker
    evicted: float | None  # displaced by a better class
    in_time: float | None  # share of the answers


class TenantLine(msgspec.Struct, kw_only=True):
    name: str
    requests_rate: float | None
    rejected_rate: float | None
    mean_queue_s: float | None
    prompt_tokens_rate: float | None
    output_tokens_rate: float | None
    output_tokens: float | None


class CacheLine(msgspec.Struct, kw_only=True):
    use: float | None  # share of the blocks
    num_blocks: float | None
    cached_blocks: float | None
    hit_rate: float | None  # tokens found, of those that entered
    sessions: float | None
    session_blocks: float | None
    host_blocks: float | None
    host_blocks_free: float | None


class StepLine(msgspec.Struct, kw_only=True):
    rate: float | None
    tokens_rate: float | None  # computed
    tokens_per_step: float | None
    seconds_per_step: float | None
    busy: float | None  # share of the time
    token_budget: float | None
    max_num_seqs: float | None
    preemptions: float | None
    preemptions_rate: float | None
    restarts: float | None  # of the engine
    breaker: str  # empty: unknown


class ErrorLine(msgspec.Struct, kw_only=True):
    """Counts under the tag of `docs/errors.md`."""

    tag: str
    refused: float  # before anything was computed
    refused_rate: float | None
    failed: float  # afterwards
    failed_rate: float | None
    gateway: float  # errors of the gateway, the server's among them


class GatewayLine(msgspec.Struct, kw_only=True):
    requests_rate: float | None
    open_requests: float | None
    hang_ups: float | None
    moved: float | None


class RequestLine(msgspec.Struct, kw_only=True):
    """Unfinished request, named by `engine` and `number`."""

    engine: str  # folder of its engine
    engine_pid: int
    number: int
    request_id: str
    priority: str
    tenant: str
    state: str
    age_s: float
    waited_s: float
    first_token_s: float | None
    tokens_rate: float | None  # since the first token
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_cached_tokens: int
    num_preemptions: int


def traffic(change: PageChange) -> Traffic:
    now = change.after
    return Traffic(
        running=now.total(metrics.RUNNING),
        waiting=now.total(metrics.WAITING),
        received_rate=change.rate(metrics.RECEIVED),
        finished_rate=change.rate(metrics.FINISHED),
        refused_rate=change.rate(metrics.REJECTED),
        rate_limited_rate=change.rate(metrics.RATE_LIMITED),
        failed_rate=change.rate(metrics.FAILED),
        prompt_tokens_rate=change.rate(metrics.PROMPT_TOKENS),
        output_tokens_rate=change.rate(metrics.GENERATION_TOKENS),
        first_token_p50_s=change.quantile(metrics.TIME_TO_FIRST_TOKEN, 0.5),
        first_token_p95_s=change.quantile(metrics.TIME_TO_FIRST_TOKEN, 0.95),
        inter_token_p50_s=change.quantile(metrics.INTER_TOKEN_LATENCY, 0.5),
        inter_token_p95_s=change.quantile(metrics.INTER_TOKEN_LATENCY, 0.95),
        queue_p95_s=change.quantile(metrics.QUEUE_TIME, 0.95),
        in_time=change.ratio(metrics.IN_TIME, metrics.ANSWERED),
    )


def classes(change: PageChange, requests: Sequence[RequestLine] | None) -> list[ClassLine]:
    """Return every class; without `requests`, the number of running ones is None."""
    running = None if requests is None else Counter(one.priority for one in requests if one.state == "running")
    return [_class(change, name, None if running is None else running[name]) for name in _CLASSES]


def _class(change: PageChange, name: str, running: int | None) -> ClassLine:
    now, of_class = change.after, {"class": name}
    return ClassLine(
        name=name,
        running=running,
        waiting=now.total(metrics.WAITING_BY_CLASS, **of_class),
        oldest_wait_s=now.highest(metrics.OLDEST_WAIT, **of_class),
        longest_wait_s=now.highest(metrics.LONGEST_WAIT, **of_class),
        started_rate=change.rate(metrics.STARTED, **of_class),
        shed=now.total(metrics.SHED, **of_class),
        evicted=now.total(metrics.EVICTED, **of_class),
        in_time=change.ratio(metrics.IN_TIME, metrics.ANSWERED, **of_class),
    )


def tenants(change: PageChange) -> list[TenantLine]:
    """Return all tenants, the busiest first."""
    names = change.after.labels(metrics.TENANT_REQUESTS, "tenant")
    return sorted((_tenant(change, name) for name in names), key=lambda one: -(one.output_tokens or 0.0))


def _tenant(change: PageChange, name: str) -> TenantLine:
    return TenantLine(
        name=name,
        requests_rate=change.rate(metrics.TENANT_REQUESTS, tenant=name),
        rejected_rate=change.rate(metrics.TENANT_REJECTED, tenant=name),
        mean_queue_s=change.ratio(metrics.TENANT_QUEUE_SECONDS, metrics.TENANT_STARTED, tenant=name),
        prompt_tokens_rate=change.rate(metrics.TENANT_PROMPT_TOKENS, tenant=name),
        output_tokens_rate=change.rate(metrics.TENANT_GENERATION_TOKENS, tenant=name),
        output_tokens=change.after.total(metrics.TENANT_GENERATION_TOKENS, tenant=name),
    )


def cache(change: PageChange) -> CacheLine:
    now = change.after
    used, most = (now.total(metrics.CACHE_BLOCKS, kv_cache_block_type=kind) for kind in ("used", "max"))
    return CacheLine(
        use=used / most if used is not None and most else None,
        num_blocks=most,
        cached_blocks=now.total(metrics.BLOCKS_CACHED),
        hit_rate=change.ratio(metrics.HIT_TOKENS, metrics.QUERIED_TOKENS),
        sessions=now.total(metrics.SESSIONS),
        session_blocks=now.total(metrics.SESSION_BLOCKS),
        host_blocks=now.total(metrics.HOST_BLOCKS),
        host_blocks_free=now.total(metrics.HOST_BLOCKS_FREE),
    )


def steps(change: PageChange) -> StepLine:
    now = change.after
    breaker = now.highest(metrics.BREAKER)
    return StepLine(
        rate=change.rate(metrics.STEPS),
        tokens_rate=change.rate(metrics.SCHEDULED_TOKENS),
        tokens_per_step=change.ratio(metrics.SCHEDULED_TOKENS, metrics.STEPS),
        seconds_per_step=change.ratio(metrics.STEP_SECONDS, metrics.STEPS),
        busy=now.highest(metrics.BUSY),
        token_budget=now.total(metrics.TOKEN_BUDGET),
        max_num_seqs=now.total(metrics.MAX_NUM_SEQS),
        preemptions=now.total(metrics.PREEMPTIONS),
        preemptions_rate=change.rate(metrics.PREEMPTIONS),
        restarts=now.total(metrics.ENGINE_RESTARTS),
        breaker="" if breaker is None else _BREAKER[int(breaker)],
    )


def errors(change: PageChange, gateway: MetricsPage | None) -> list[ErrorLine]:
    """Return the tags that occurred, the most frequent first."""
    tags = {tag for name in (metrics.REJECTED, metrics.FAILED) for tag in change.after.labels(name, "tag")}
    if gateway is not None:
        tags |= set(gateway.labels(metrics.GATEWAY_ERRORS, "tag"))
    lines = [_error(change, gateway, tag) for tag in sorted(tags)]
    seen = [one for one in lines if one.refused or one.failed or one.gateway]
    return sorted(seen, key=lambda one: -max(one.refused + one.failed, one.gateway))


def _error(change: PageChange, gateway: MetricsPage | None, tag: str) -> ErrorLine:
    return ErrorLine(
        tag=tag,
        refused=change.after.total(metrics.REJECTED, tag=tag) or 0.0,
        refused_rate=change.rate(metrics.REJECTED, tag=tag),
        failed=change.after.total(metrics.FAILED, tag=tag) or 0.0,
        failed_rate=change.rate(metrics.FAILED, tag=tag),
        gateway=(gateway.total(metrics.GATEWAY_ERRORS, tag=tag) or 0.0) if gateway is not None else 0.0,
    )


def gateway_line(change: PageChange) -> GatewayLine:
    now = change.after
    return GatewayLine(
        requests_rate=change.rate(metrics.GATEWAY_REQUESTS),
        open_requests=now.total(metrics.GATEWAY_OPEN),
        hang_ups=now.total(metrics.GATEWAY_HANG_UPS),
        moved=now.total(metrics.GATEWAY_MOVED),
    )
