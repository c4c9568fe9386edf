from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tidewheel.errors import ConfigError
from tidewheel.scheduler.policy import POLICIES
from tidewheel.scheduler.strategy import StrategyConfig
from tidewheel.tenants import TenantLimits, limits_of

_PREEMPTION_MODES = ("auto", "recompute", "swap")
_LEAST = {
    "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, "max_waiting_requests": 1,
    "max_waiting_tokens": 1, "predictor_prior_tokens": 1, "max_preemptions": 0, "long_prefill_token_threshold": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Scheduler settings. Raises `ConfigError` with name and value."""

    max_num_seqs: int
    max_num_batched_tokens: int  # token budget per step
    max_model_len: int
    max_waiting_requests: int
    max_waiting_tokens: int
    max_inflight_steps: int = 1  # 1, or 2 to overlap host and device
    watermark: float = 0.01  # share of the blocks that an admission leaves free

    policy: str = "priority"
    ageing_s: float = 10.0  # waiting time that lifts a request one class, up to HIGH
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    cache_aware_order: bool = True  # longest cached prefix first in a class, until others waited `ageing_s`
    predictor_prior_tokens: int = 128  # output length assumed at first

    # The breaker opens above these; None: never.
    breaker_error_rate: float | None = None
    breaker_queue_time_s: float | None = None

    admit_by_growth: bool = True  # admit only if running requests probably find room to grow
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    max_preemptions: int = 4  # per request, while there are other victims
    swap_seconds_per_block: float | None = None  # per copy to or from host; None: no host tier
    long_prefill_token_threshold: int | None = None  # prompt tokens per request and step; None: the budget

    strategy: StrategyConfig = field(default_factory=StrategyConfig)

    target_tpot_s: float | None = None  # adapts the token budget; None: fixed
    enable_seqs_governor: bool = False  # adapts running requests, up to max_num_seqs
    governor_target_latency_s: float | None = None  # limit of the step time; None: memory only

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}: it must be at least {least}")
        if self.policy not in POLICIES:
            raise ConfigError(f"scheduling_policy is {self.policy!r}: choose one of {', '.join(POLICIES)}")
        if self.preemption_mode not in _PREEMPTION_MODES:
            modes = ", ".join(_PREEMPTION_MODES)
            raise ConfigError(f"preemption_mode is {self.preemption_mode!r}: choose one of {modes}")
        if self.max_inflight_steps not in (1, 2):
            raise ConfigError(f"max_inflight_steps is {self.max_inflight_steps}: it must be 1 or 2")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark is {self.watermark}: it must be at least 0 and less than 1")
        if self.ageing_s <= 0.0:
            raise ConfigError(f"ageing_s is {self.ageing_s}: it must be above 0")

    @property
    def num_rows(self) -> int:
        """Most running requests; the budget gives each a token."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_chunk_tokens(self) -> int:
        """Most tokens of one request per step."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens

    def limits_of(self, tenant: str) -> TenantLimits:
        return limits_of(self.tenants, tenant)
