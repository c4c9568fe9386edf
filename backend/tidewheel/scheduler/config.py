from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidewheel.config import PreemptionMode, SchedulingSettings, at_least
from tidewheel.errors import ConfigError
from tidewheel.scheduler.policy import POLICIES
from tidewheel.scheduler.strategy import STRATEGIES
from tidewheel.tenants import TenantLimits

_PREEMPTION_MODES = typing.get_args(PreemptionMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulingSettings):
    """Scheduler settings. Raise `ConfigError` with name and value."""

    max_model_len: int
    max_inflight_steps: int = 1  # 2 overlaps host and device
    watermark: float = 0.01  # fraction of blocks that admission leaves free
    policy: str = "priority"
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    swap_seconds_per_block: float | None = None  # one way; None: no host tier

    def __post_init__(self) -> None:
        SchedulingSettings.__post_init__(self)
        at_least(self, 1, "max_model_len")
        for name, value, choices in (
            ("scheduling_policy", self.policy, POLICIES),
            ("scheduling_strategy", self.scheduling_strategy, STRATEGIES),
            ("preemption_mode", self.preemption_mode, _PREEMPTION_MODES),
        ):
            if value not in choices:
                raise ConfigError(f"{name} is {value!r}: choose one of {', '.join(choices)}")
        if self.max_inflight_steps not in (1, 2):
            raise ConfigError(f"max_inflight_steps is {self.max_inflight_steps}: it must be 1 or 2")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark is {self.watermark}: it must be at least 0 and less than 1")
        if self.ageing_s <= 0.0:
            raise ConfigError(f"ageing_s is {self.ageing_s}: it must be above 0")

    @property
    def num_rows(self) -> int:
        """Largest number of running requests: the token budget gives each a token."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def differs(self, other: SchedulerConfig, *names: str) -> bool:
        return any(getattr(self, name) != getattr(other, name) for name in names)
