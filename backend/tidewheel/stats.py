"""Figures of the engine: counted by cache and scheduler, sent to front ends, published as metrics."""

from __future__ import annotations

from copy import copy

import msgspec


def _zeros() -> list[int]:
    return [0, 0, 0, 0]


class TenantFigures(msgspec.Struct):
    """Sums since the start over the requests of one tenant; each of `n` sequences counts."""

    num_requests: int = 0
    num_rejected: int = 0  # of these
    num_started: int = 0  # of these
    queue_seconds: float = 0.0  # from arrival to start, of those that started
    num_prompt_tokens: int = 0  # of requests that started and have ended
    num_output_tokens: int = 0


class EngineStats(msgspec.Struct):
    """Figures of one engine; sums since its start, or values of now.

    One struct is counted in for good. Front ends and callers get snapshots, in which the values of now are right.
    Lists have an element for each class as asked for, CRITICAL … LOW.
    """

    num_running: int = 0
    num_waiting: int = 0  # never started, and preempted
    num_waiting_tokens: int = 0  # their prompts, and what preempted ones had put out
    num_blocks: int = 0
    num_free_blocks: int = 0  # empty, evictable, or held by sessions alone
    num_cached_blocks: int = 0  # evictable blocks whose content is kept
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prefix_queries: int = 0  # prompt tokens looked up
    num_prefix_hits: int = 0  # prompt tokens found
    num_preemptions: int = 0
    step_seconds: float = 0.0  # sum over steps
    busy_fraction: float = 0.0  # step time over wall time since the last snapshot
    waiting_by_class: list[int] = msgspec.field(default_factory=_zeros)
    num_swap_preemptions: int = 0  # preemptions that kept what was computed in the host tier
    num_evicted: int = 0  # waiting requests refused because one of a higher class took their place
    num_expired: int = 0  # requests whose deadline passed
    num_hopeless: int = 0  # refused because their deadline could not be met
    num_rate_limited: int = 0  # refused because their tenant is over its rates
    num_aged: int = 0  # lifts by one class
    num_downgraded_quota: int = 0
    num_downgraded_deadline: int = 0
    started_by_class: list[int] = msgspec.field(default_factory=_zeros)
    evicted_by_class: list[int] = msgspec.field(default_factory=_zeros)
    max_wait_by_class: list[float] = msgspec.field(default_factory=lambda: [0.0] * 4)  # seconds until the start
    num_shed_by_class: list[int] = msgspec.field(default_factory=_zeros)  # refused by the breaker
    breaker_state: str = "closed"  # or open, half_open
    token_budget: int = 0  # of a step, as it is now
    max_num_seqs: int = 0  # as it is now
    num_predictions: int = 0  # of output lengths, that came to an end
    prediction_error: float = 0.0  # tokens, mean absolute, smoothed
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0  # empty or evictable
    num_swapped_out: int = 0  # blocks
    num_swapped_in: int = 0  # blocks
    num_sessions: int = 0
    num_session_blocks: int = 0  # that sessions alone hold
    num_hit_queries: int = 0  # tokens of rows that entered; a preempted request counts again when it returns
    num_device_hits: int = 0  # of these, found in the pool: by sharing a block or copying a part of one
    num_host_hits: int = 0  # of these, read back from the host tier
    num_session_hits: int = 0  # in either, as part of the request's session
    num_used_slots: int = 0  # of running rows, that hold a computed token
    num_taken_slots: int = 0  # of their blocks; 1 - used / taken is the fragmentation
    num_wasted_slots: int = 0  # of these, behind the last token of a row
    tenants: dict[str, TenantFigures] = {}  # by label, of which there is a bounded number

    def snapshot(self) -> EngineStats:
        """Return a copy that later counting does not change."""
        stats = copy(self)
        stats.waiting_by_class = self.waiting_by_class.copy()
        stats.started_by_class = self.started_by_class.copy()
        stats.evicted_by_class = self.evicted_by_class.copy()
        stats.max_wait_by_class = self.max_wait_by_class.copy()
        stats.num_shed_by_class = self.num_shed_by_class.copy()
        stats.tenants = {label: copy(figures) for label, figures in self.tenants.items()}
        return stats


class WaitingRoom(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bounds of the waiting set and how much of them is taken, so that front ends do not ask in vain."""

    num_requests: int  # that never started
    max_requests: int
    num_tokens: int  # of their prompts
    max_tokens: int
    lowest_class: int  # among them: newcomers of this class and lower ones take no place; over LOW: some may
    retry_after_ms: int
