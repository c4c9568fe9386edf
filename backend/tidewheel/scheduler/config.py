from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidewheel.config import SchedulingSettings
from tidewheel.tenants import TenantLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulingSettings):
    max_model_len: int
    max_inflight_steps: int = 1  # 2: the second continues rows of the first; more: each has rows of its own
    watermark: float = 0.01  # fraction of blocks that admission leaves free
    policy: str = "priority"
    least_cut_tokens: int = 16  # of a step that is cut to a slice
    takes_turns: bool = False  # a step has rows of one bucket, whose requests take many steps
    has_quantized_copy: bool = False  # of the weights, for times of pressure
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    max_loras: int = 0  # slots of adapters; 0: no request has one
    lora_limits: Mapping[str, TenantLimits] = field(default_factory=dict)  # rates by adapter
    swap_seconds_per_block: float | None = None  # one way; None: no host tier
    speculation: str = "none"
    num_speculative_tokens: int = 8
    decode_seconds: Sequence[tuple[int, float]] = ()  # of steps by number of decodes, measured at load

    @property
    def num_rows(self) -> int:
        """Limit of running sequences; each needs a token of the token budget of its steps."""
        return min(self.max_num_seqs, self.max_num_batched_tokens * max(self.max_inflight_steps - 1, 1))
