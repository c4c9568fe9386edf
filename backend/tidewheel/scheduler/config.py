from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidewheel.config import SchedulingSettings
from tidewheel.tenants import TenantLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulingSettings):
    max_model_len: int
    max_inflight_steps: int = 1  # or 2, which overlaps host and device
    watermark: float = 0.01  # fraction of blocks that admission leaves free
    policy: str = "priority"
    least_cut_tokens: int = 16  # of a step that is cut to a slice
    has_quantized_copy: bool = False  # of the weights, for times of pressure
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    swap_seconds_per_block: float | None = None  # one way; None: no host tier

    @property
    def num_rows(self) -> int:
        """Limit of running sequences; each needs a token of a step's token budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def differs(self, other: SchedulerConfig, *names: str) -> bool:
        return any(getattr(self, name) != getattr(other, name) for name in names)
