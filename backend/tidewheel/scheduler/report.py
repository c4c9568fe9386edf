"""A snapshot of the scheduler's figures."""

from __future__ import annotations

from typing import cast

from tidewheel.request import Priority
from tidewheel.scheduler.control import Control
from tidewheel.scheduler.entrance import Entrance
from tidewheel.scheduler.state import State
from tidewheel.scheduler.stats import ByClass, SchedulerStats


def snapshot(state: State, control: Control, entrance: Entrance) -> SchedulerStats:
    kv, counters = state.kv, state.counters
    return SchedulerStats(
        num_running=state.columns.num_running,
        num_waiting=state.num_waiting,
        num_waiting_tokens=state.num_waiting_tokens,
        waiting_by_class=_by_class(state.waiting_by_class),
        num_blocks=kv.num_blocks,
        num_free_blocks=kv.num_free_blocks,
        num_cached_blocks=kv.num_cached_blocks,
        num_steps=counters.num_steps,
        num_scheduled_tokens=counters.num_scheduled_tokens,
        num_prefix_queries=counters.num_prefix_queries,
        num_prefix_hits=counters.num_prefix_hits,
        num_preemptions=counters.num_preemptions,
        num_swap_preemptions=counters.num_swap_preemptions,
        num_evicted=counters.num_evicted,
        num_expired=counters.num_expired,
        num_hopeless=counters.num_hopeless,
        num_rate_limited=counters.num_rate_limited,
        num_aged=counters.num_aged,
        num_downgraded_quota=counters.num_downgraded_quota,
        num_downgraded_deadline=counters.num_downgraded_deadline,
        started_by_class=_by_class(counters.started_by_class),
        evicted_by_class=_by_class(counters.evicted_by_class),
        max_wait_by_class=cast(tuple[float, float, float, float], tuple(counters.max_wait_by_class)),
        num_shed_by_class=_by_class([entrance.breaker.num_shed[service_class] for service_class in Priority]),
        breaker_state=entrance.breaker.state.value,
        token_budget=control.knobs.token_budget,
        max_num_seqs=control.knobs.max_num_seqs,
        num_predictions=entrance.predictor.num_observed,
        prediction_error=entrance.predictor.mean_abs_error,
        num_host_blocks=kv.num_host_blocks,
        num_free_host_blocks=kv.num_free_host_blocks,
        num_swapped_out=kv.num_swapped_out,
        num_swapped_in=kv.num_swapped_in,
        num_sessions=kv.num_sessions,
        num_session_blocks=kv.num_session_blocks,
        num_hit_queries=kv.num_hit_queries,
        num_device_hits=kv.num_device_hits,
        num_host_hits=kv.num_host_hits,
        num_session_hits=kv.num_session_hits,
        num_used_slots=state.columns.num_used_slots,
        num_taken_slots=state.columns.num_taken_slots,
        num_wasted_slots=state.columns.num_wasted_slots,
        tenants=entrance.tenant_counts.snapshot(),
    )


def _by_class(counts: list[int]) -> ByClass:
    return cast(ByClass, tuple(counts))
