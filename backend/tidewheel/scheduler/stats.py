"""What the scheduler reports; the names are those of `engine.messages.EngineStats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class Counters:
    """Sums since the start."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prefix_queries: int = 0  # prompt tokens looked up
    num_prefix_hits: int = 0  # prompt tokens found
    num_preemptions: int = 0


class SchedulerStats(NamedTuple):
    """A snapshot."""

    num_running: int
    num_waiting: int  # never started, and preempted
    num_waiting_tokens: int
    waiting_by_class: tuple[int, int, int, int]  # CRITICAL … LOW
    num_blocks: int
    num_free_blocks: int  # empty or evictable
    num_cached_blocks: int  # evictable, content kept
    num_steps: int
    num_scheduled_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_preemptions: int
