"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.errors import ConfigError
from tidewheel.scheduler.policy import POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits in sequences, tokens and requests. Raises `ConfigError` naming the setting and the value."""

    max_num_seqs: int
    max_num_batched_tokens: int  # token budget of a step
    max_model_len: int
    max_waiting_requests: int
    max_waiting_tokens: int
    policy: str = "priority"
    max_inflight_steps: int = 1  # batches scheduled and not yet applied: 1, or 2 to overlap host and device
    watermark: float = 0.01  # share of the pool that an admission leaves free, so that running requests can grow

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_waiting_requests", "max_waiting_tokens",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.policy not in POLICIES:
            raise ConfigError(f"scheduling_policy is {self.policy!r}: choose one of {', '.join(POLICIES)}")
        if self.max_inflight_steps not in (1, 2):
            raise ConfigError(f"max_inflight_steps is {self.max_inflight_steps}: it must be 1 or 2")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark is {self.watermark}: it must be at least 0 and less than 1")

    @property
    def num_rows(self) -> int:
        """Running requests at most. Not more than the budget: every row must get a token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)
