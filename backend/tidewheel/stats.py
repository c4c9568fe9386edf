"""Engine figures for front ends and metrics."""

from __future__ import annotations

from copy import copy

import msgspec


def _zeros() -> list[int]:
    return [0, 0, 0, 0]


class TenantFigures(msgspec.Struct):
    """Sums over one tenant's requests. Each of `n` sequences counts."""

    num_requests: int = 0
    num_rejected: int = 0
    num_started: int = 0
    queue_seconds: float = 0.0  # from arrival to start
    num_prompt_tokens: int = 0  # of ended requests that started
    num_output_tokens: int = 0


class EngineStats(msgspec.Struct):
    """Sums since the start, and current values, of one engine.

    Only snapshots have correct current values. Lists have one element per requested class, CRITICAL … LOW.
    """

    num_running: int = 0
    num_waiting: int = 0  # new and preempted
    num_waiting_tokens: int = 0  # prompts, and output of preempted requests
    num_blocks: int = 0
    num_free_blocks: int = 0  # empty, evictable, or held only by sessions
    num_cached_blocks: int = 0  # evictable, with content
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prefix_queries: int = 0  # prompt tokens
    num_prefix_hits: int = 0  # prompt tokens
    num_preemptions: int = 0
    step_seconds: float = 0.0
    busy_fraction: float = 0.0  # step time over wall time, since the last snapshot
    waiting_by_class: list[int] = msgspec.field(default_factory=_zeros)
    num_swap_preemptions: int = 0  # kept computed blocks in the host tier
    num_evicted: int = 0  # lost their waiting place to another request
    num_expired: int = 0  # deadline passed
    num_hopeless: int = 0  # deadline could not be met
    num_rate_limited: int = 0
    num_aged: int = 0  # lifts
    num_downgraded_quota: int = 0
    num_downgraded_deadline: int = 0
    started_by_class: list[int] = msgspec.field(default_factory=_zeros)
    evicted_by_class: list[int] = msgspec.field(default_factory=_zeros)
    max_wait_by_class: list[float] = msgspec.field(default_factory=lambda: [0.0] * 4)  # seconds until start
    num_shed_by_class: list[int] = msgspec.field(default_factory=_zeros)  # by the breaker
    breaker_state: str = "closed"  # or open, half_open
    token_budget: int = 0  # current, per step
    max_num_seqs: int = 0  # current
    num_predictions: int = 0  # of output lengths of ended requests
    prediction_error: float = 0.0  # smoothed mean absolute, in tokens
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0  # empty or evictable
    num_swapped_out: int = 0  # blocks
    num_swapped_in: int = 0  # blocks
    num_sessions: int = 0
    num_session_blocks: int = 0  # held only by sessions
    num_hit_queries: int = 0  # tokens of rows that entered, also after a preemption
    num_device_hits: int = 0  # tokens in the pool: shared blocks or copied parts
    num_host_hits: int = 0  # tokens from the host tier
    num_session_hits: int = 0  # tokens of the request's session, in either tier
    num_used_slots: int = 0  # computed tokens of running rows
    num_taken_slots: int = 0  # in their blocks; fragmentation is 1 - used / taken
    num_wasted_slots: int = 0  # behind a row's last token
    tenants: dict[str, TenantFigures] = {}  # by label, a bounded number

    def snapshot(self) -> EngineStats:
        stats = copy(self)
        stats.waiting_by_class = self.waiting_by_class.copy()
        stats.started_by_class = self.started_by_class.copy()
        stats.evicted_by_class = self.evicted_by_class.copy()
        stats.max_wait_by_class = self.max_wait_by_class.copy()
        stats.num_shed_by_class = self.num_shed_by_class.copy()
        stats.tenants = {label: copy(figures) for label, figures in self.tenants.items()}
        return stats


class WaitingRoom(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bounds and usage of the waiting set. With it front ends refuse without asking."""

    num_requests: int  # new
    max_requests: int
    num_tokens: int  # of their prompts
    max_tokens: int
    lowest_class: int  # only better classes may take a place; over LOW: any
    retry_after_ms: int
