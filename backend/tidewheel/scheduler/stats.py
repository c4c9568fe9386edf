"""What the scheduler reports; the names are those of `engine.messages.EngineStats`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

ByClass = tuple[int, int, int, int]  # CRITICAL … LOW, as asked for


def _zeros() -> list[int]:
    return [0, 0, 0, 0]


@dataclass(slots=True)
class Counters:
    """Sums since the start."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prefix_queries: int = 0  # prompt tokens looked up
    num_prefix_hits: int = 0  # prompt tokens found
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_evicted: int = 0
    num_expired: int = 0
    num_hopeless: int = 0
    num_rate_limited: int = 0
    num_aged: int = 0
    num_downgraded_quota: int = 0
    num_downgraded_deadline: int = 0
    started_by_class: list[int] = field(default_factory=_zeros)
    evicted_by_class: list[int] = field(default_factory=_zeros)
    max_wait_by_class: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])


@dataclass(slots=True)
class TenantFigures:
    """Sums since the start over the requests of one tenant; each of `n` sequences counts."""

    num_requests: int = 0
    num_rejected: int = 0  # of these
    num_started: int = 0  # of these
    queue_seconds: float = 0.0  # from arrival to start, of those that started
    num_prompt_tokens: int = 0  # of requests that started and have ended
    num_output_tokens: int = 0


class WaitingRoom(NamedTuple):
    """How full the waiting set is, for those who would not ask in vain."""

    num_requests: int  # that never started
    max_requests: int
    num_tokens: int  # of their prompts
    max_tokens: int
    lowest_class: int  # among them: newcomers of this class and lower ones take nobody's place; over LOW: some may
    retry_after_ms: int


class SchedulerStats(NamedTuple):
    """A snapshot. Times in seconds."""

    num_running: int
    num_waiting: int  # never started, and preempted
    num_waiting_tokens: int
    waiting_by_class: ByClass
    num_blocks: int
    num_free_blocks: int  # empty or evictable
    num_cached_blocks: int  # evictable, content kept
    num_steps: int
    num_scheduled_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_preemptions: int
    num_swap_preemptions: int  # those that kept what they had computed in the host tier
    num_evicted: int  # waiting requests refused because one of a higher class took their place
    num_expired: int  # requests whose deadline passed
    num_hopeless: int  # refused because their deadline could not be met
    num_aged: int  # lifts by one class
    num_downgraded_quota: int
    num_downgraded_deadline: int
    started_by_class: ByClass
    evicted_by_class: ByClass
    max_wait_by_class: tuple[float, float, float, float]  # longest wait of those that started
    num_shed_by_class: ByClass  # refused by the breaker
    breaker_state: str  # closed, open, half_open
    num_rate_limited: int  # refused because their tenant is over its rates
    token_budget: int  # of a step, as it is now
    max_num_seqs: int  # as it is now
    num_predictions: int  # of output lengths, that came to an end
    prediction_error: float  # tokens, mean absolute, smoothed
    num_host_blocks: int
    num_free_host_blocks: int  # empty or evictable
    num_swapped_out: int  # blocks
    num_swapped_in: int  # blocks
    num_sessions: int
    num_session_blocks: int  # that sessions alone hold
    num_hit_queries: int  # tokens of rows that entered; a preempted request counts again when it returns
    num_device_hits: int  # found in the pool
    num_host_hits: int  # found in the host tier
    num_session_hits: int  # in either, as part of the request's session
    num_used_slots: int  # of running rows, that hold a computed token
    num_taken_slots: int  # of their blocks; 1 - used / taken is the fragmentation
    num_wasted_slots: int  # of these, behind the last token of a row
    tenants: Mapping[str, TenantFigures]  # by label
