from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from tidewheel.batch import Float64Array
from tidewheel.errors import KvCacheFull, WaitingSetFull

DEFAULT_TTFT_S, DEFAULT_TPOT_S = 1.0, 0.1
# Upper bounds of tokens per step, as in Triton's vLLM backend.
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram(msgspec.Struct):
    """Number and sum of values by bucket. The last bucket has no upper bound."""

    bounds: tuple[float, ...]  # upper, included
    counts: list[int] = []  # [len(bounds) + 1], not cumulative
    sums: list[float] = []  # [len(bounds) + 1]

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.sums = self.sums or [0.0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += count
        self.sums[bucket] += value * count

    def observe_all(self, values: Float64Array) -> None:
        buckets = np.searchsorted(_edges(self.bounds), values)
        counts, sums = np.bincount(buckets), np.bincount(buckets, values)
        for bucket in counts.nonzero()[0].tolist():
            self.counts[bucket] += int(counts[bucket])
            self.sums[bucket] += float(sums[bucket])

    def copy(self) -> "Histogram":
        return Histogram(self.bounds, self.counts.copy(), self.sums.copy())


@lru_cache
def _edges(bounds: tuple[float, ...]) -> Float64Array:
    return np.array(bounds, np.float64)


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits of an answer in time: seconds to the first token, mean seconds per later token."""

    ttft_s: float = DEFAULT_TTFT_S
    tpot_s: float = DEFAULT_TPOT_S

    def whole_answer_s(self, num_output_tokens: int) -> float:
        return self.ttft_s + self.tpot_s * max(num_output_tokens - 1, 0)


class RequestFigures(msgspec.Struct):
    """Sums over requests since the engine's start."""

    num_requests: int = 0
    num_prompt_tokens: int = 0  # of started requests that ended
    num_output_tokens: int = 0


class TenantFigures(RequestFigures):
    num_rejected: int = 0
    num_started: int = 0
    queue_seconds: float = 0.0
    num_objectives: int = 0  # requests with an objective that ended, refused ones included
    num_objectives_met: int = 0


class LoraFigures(RequestFigures):
    num_running: int = 0  # in snapshots
    num_waiting: int = 0


class EngineStats(msgspec.Struct):
    """Sums since the engine's start; in snapshots also current values. Lists are by requested class."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # with the output of preempted requests
    num_blocks: int = 0
    num_free_blocks: int = 0  # empty, evictable, or held only by sessions
    num_cached_blocks: int = 0  # evictable, with content
    num_steps: int = 0
    num_quantized_steps: int = 0  # of num_steps
    num_scheduled_tokens: int = 0
    step_tokens: Histogram = msgspec.field(default_factory=lambda: Histogram(STEP_BOUNDS))
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0  # rows of steps that had drafts
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0  # of num_draft_tokens
    step_seconds: float = 0.0
    turn_wait_seconds: float = 0.0  # for other engines of the device
    busy_fraction: float = 0.0  # since the last snapshot
    waiting_by_class: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    num_swap_preemptions: int = 0
    num_expired: int = 0
    num_hopeless: int = 0
    num_rate_limited: int = 0
    num_aged: int = 0
    num_downgraded_quota: int = 0
    num_downgraded_deadline: int = 0
    num_downgraded_objective: int = 0
    started_by_class: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    objectives_by_class: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    objectives_met_by_class: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    evicted_by_class: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    max_wait_by_class: list[float] = msgspec.field(default_factory=lambda: [0.0] * 4)
    oldest_wait_by_class: list[float] = msgspec.field(default_factory=lambda: [0.0] * 4)
    num_shed_by_class: list[int] = msgspec.field(default_factory=lambda: [0] * 4)
    breaker_state: int = 0  # closed; 1: half open, 2: open
    token_budget: int = 0
    max_num_seqs: int = 0
    num_predictions: int = 0  # ended requests with a predicted length
    prediction_error: float = 0.0  # mean absolute, smoothed, tokens
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0  # empty or evictable
    num_swapped_out: int = 0  # blocks
    num_swapped_in: int = 0  # blocks
    num_sessions: int = 0
    num_paused_sessions: int = 0  # whose tools or next turn run
    num_session_blocks: int = 0  # held only by sessions
    num_hit_queries: int = 0  # tokens of rows that enter, also after preemption
    num_device_hits: int = 0
    num_host_hits: int = 0
    num_used_slots: int = 0  # with a computed token, of running rows
    num_taken_slots: int = 0  # in the blocks of running rows
    num_wasted_slots: int = 0  # after the last token
    tenants: dict[str, TenantFigures] = {}
    num_lora_slots: int = 0  # with an adapter
    num_lora_loads: int = 0  # into slots
    num_lora_evictions: int = 0  # from slots
    loras: dict[str, LoraFigures] = {}  # by label of an adapter

    @property
    def num_full_steps(self) -> int:
        return self.num_steps - self.num_quantized_steps

    @property
    def kv_usage(self) -> float:
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def kv_fragmentation(self) -> float:
        return 1.0 - self.num_used_slots / self.num_taken_slots if self.num_taken_slots else 0.0

    def snapshot(self) -> "EngineStats":
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=EngineStats)


class BlockShortage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Numbers of free KV blocks: needed by the first waiting request, and present."""

    num_needed: int  # its blocks, and the expected growth of running requests
    num_free: int


class WaitingRoom(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Limits and fill of the waiting set, by which front ends refuse requests."""

    num_requests: int
    max_requests: int
    num_tokens: int
    max_tokens: int
    lowest_class: int  # that displaces no request; over LOW: none
    retry_after_ms: int
    shortage: BlockShortage | None  # None: the first request waits for something else

    def refusal(self, full: str) -> WaitingSetFull:
        """Return the error of a full waiting set; `full` says which limit is reached."""
        message = f"waiting set is full: {full}"
        if self.shortage is None:
            return WaitingSetFull(message, retry_after_ms=self.retry_after_ms)
        blocks = f"{self.shortage.num_needed} must be free, and {self.shortage.num_free} are"
        return KvCacheFull(
            f"{message}; the first request in line waits for blocks of the KV cache: {blocks}",
            retry_after_ms=self.retry_after_ms,
        )
