"""The view of two pages of metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tidewheel.request import Priority
from tidewheel.top.metric_changes import Change, Page
from tidewheel.top.server_view import (
    CacheLine,
    ClassLine,
    ErrorLine,
    GatewayLine,
    RequestLine,
    StepLine,
    TenantLine,
    Traffic,
)

FAMILY = "tidewheel_requests_received_total"  # that every model with metrics has
_REJECTED, _FAILED = "tidewheel_requests_rejected_total", "tidewheel_requests_failed_total"
_IN_TIME, _ANSWERED = "tidewheel_requests_in_time_total", "tidewheel_requests_answered_total"
_GATEWAY_ERRORS = "tidewheel_gateway_errors_total"
_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
_BREAKER = ("closed", "half open", "open")
_CLASSES = tuple(priority.name.lower() for priority in Priority)


def traffic(change: Change) -> Traffic:
    now = change.after
    return Traffic(
        running=now.total("vllm:num_requests_running"),
        waiting=now.total("vllm:num_requests_waiting"),
        received_rate=change.rate(FAMILY),
        finished_rate=change.rate("vllm:request_success_total"),
        refused_rate=change.rate(_REJECTED),
        rate_limited_rate=change.rate("tidewheel_requests_rate_limited_total"),
        failed_rate=change.rate(_FAILED),
        prompt_tokens_rate=change.rate("vllm:prompt_tokens_total"),
        output_tokens_rate=change.rate("vllm:generation_tokens_total"),
        first_token_p50_s=change.quantile("vllm:time_to_first_token_seconds", 0.5),
        first_token_p95_s=change.quantile("vllm:time_to_first_token_seconds", 0.95),
        inter_token_p50_s=change.quantile("vllm:inter_token_latency_seconds", 0.5),
        inter_token_p95_s=change.quantile("vllm:inter_token_latency_seconds", 0.95),
        queue_p95_s=change.quantile("vllm:request_queue_time_seconds", 0.95),
        in_time=change.ratio(_IN_TIME, _ANSWERED),
    )


def classes(change: Change, requests: Sequence[RequestLine] | None) -> list[ClassLine]:
    """Return every class. Without a list of requests, none are counted as running."""
    running = None if requests is None else Counter(one.priority for one in requests if one.state == "running")
    return [_class(change, name, None if running is None else running[name]) for name in _CLASSES]


def _class(change: Change, name: str, running: int | None) -> ClassLine:
    now, of_class = change.after, {"class": name}
    return ClassLine(
        name=name,
        running=running,
        waiting=now.total("tidewheel_requests_waiting", **of_class),
        oldest_wait_s=now.highest("tidewheel_wait_oldest_seconds", **of_class),
        longest_wait_s=now.highest("tidewheel_wait_max_seconds", **of_class),
        started_rate=change.rate("tidewheel_requests_started_total", **of_class),
        shed=now.total("tidewheel_requests_shed_total", **of_class),
        evicted=now.total("tidewheel_requests_evicted_total", **of_class),
        in_time=change.ratio(_IN_TIME, _ANSWERED, **of_class),
    )


def tenants(change: Change) -> list[TenantLine]:
    """Return all tenants, the busiest first."""
    names = change.after.labels("tidewheel_tenant_requests_total", "tenant")
    return sorted((_tenant(change, name) for name in names), key=lambda one: -(one.output_tokens or 0.0))


def _tenant(change: Change, name: str) -> TenantLine:
    return TenantLine(
        name=name,
        requests_rate=change.rate("tidewheel_tenant_requests_total", tenant=name),
        rejected_rate=change.rate("tidewheel_tenant_requests_rejected_total", tenant=name),
        mean_queue_s=change.ratio(
            "tidewheel_tenant_queue_seconds_total", "tidewheel_tenant_requests_started_total", tenant=name
        ),
        prompt_tokens_rate=change.rate("tidewheel_tenant_prompt_tokens_total", tenant=name),
        output_tokens_rate=change.rate("tidewheel_tenant_generation_tokens_total", tenant=name),
        output_tokens=change.after.total("tidewheel_tenant_generation_tokens_total", tenant=name),
    )


def cache(change: Change) -> CacheLine:
    now = change.after
    used, most = (now.total(_BLOCKS, kv_cache_block_type=kind) for kind in ("used", "max"))
    return CacheLine(
        use=used / most if used is not None and most else None,
        num_blocks=most,
        cached_blocks=now.total("tidewheel_kv_blocks_cached"),
        hit_rate=change.ratio("tidewheel_kv_hit_tokens_total", "tidewheel_kv_queried_tokens_total"),
        sessions=now.total("tidewheel_sessions"),
        session_blocks=now.total("tidewheel_session_blocks"),
        host_blocks=now.total("tidewheel_kv_host_blocks"),
        host_blocks_free=now.total("tidewheel_kv_host_blocks_free"),
    )


def steps(change: Change) -> StepLine:
    now = change.after
    breaker = now.highest("tidewheel_breaker_state")
    return StepLine(
        rate=change.rate("tidewheel_steps_total"),
        tokens_rate=change.rate("tidewheel_scheduled_tokens_total"),
        tokens_per_step=change.ratio("tidewheel_scheduled_tokens_total", "tidewheel_steps_total"),
        seconds_per_step=change.ratio("tidewheel_step_seconds_total", "tidewheel_steps_total"),
        busy=now.highest("tidewheel_engine_busy_fraction"),
        token_budget=now.total("tidewheel_token_budget"),
        max_num_seqs=now.total("tidewheel_max_num_seqs"),
        preemptions=now.total("vllm:num_preemptions_total"),
        preemptions_rate=change.rate("vllm:num_preemptions_total"),
        restarts=now.total("tidewheel_engine_restarts_total"),
        breaker="" if breaker is None else _BREAKER[int(breaker)],
    )


def errors(change: Change, gateway: Page | None) -> list[ErrorLine]:
    """Return the tags that occurred, the most frequent first."""
    tags = {tag for name in (_REJECTED, _FAILED) for tag in change.after.labels(name, "tag")}
    if gateway is not None:
        tags |= set(gateway.labels(_GATEWAY_ERRORS, "tag"))
    lines = [_error(change, gateway, tag) for tag in sorted(tags)]
    seen = [one for one in lines if one.refused or one.failed or one.gateway]
    return sorted(seen, key=lambda one: -max(one.refused + one.failed, one.gateway))


def _error(change: Change, gateway: Page | None, tag: str) -> ErrorLine:
    return ErrorLine(
        tag=tag,
        refused=change.after.total(_REJECTED, tag=tag) or 0.0,
        refused_rate=change.rate(_REJECTED, tag=tag),
        failed=change.after.total(_FAILED, tag=tag) or 0.0,
        failed_rate=change.rate(_FAILED, tag=tag),
        gateway=(gateway.total(_GATEWAY_ERRORS, tag=tag) or 0.0) if gateway is not None else 0.0,
    )


def gateway_line(change: Change) -> GatewayLine:
    now = change.after
    return GatewayLine(
        requests_rate=change.rate("tidewheel_gateway_requests_total"),
        open_requests=now.total("tidewheel_gateway_open_requests"),
        hang_ups=now.total("tidewheel_gateway_hang_ups_total"),
        moved=now.total("tidewheel_gateway_moved_total"),
    )
