"""What an engine asks of a scheduler: the real one, or the real one with every decision written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidewheel.batch import SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.errors import TidewheelError
from tidewheel.request import FinishReason, Request
from tidewheel.scheduler.stats import SchedulerStats


class EngineScheduler(Protocol):
    """The methods of `scheduler.Scheduler`, which documents them."""

    @property
    def has_unfinished(self) -> bool: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def add(self, request: Request, now: float) -> list[Request]: ...

    def add_group(self, requests: Sequence[Request], now: float) -> list[Request]: ...

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> Request | None: ...

    def expire(self, now: float) -> list[Request]: ...

    def close_session(self, tenant: str, session_id: str) -> None: ...

    def fail_all(self, error: TidewheelError) -> list[Request]: ...

    def schedule(self, now: float) -> ScheduledBatch | None: ...

    def apply(self, batch: ScheduledBatch, sampled: SampledTokens, now: float) -> StepOutputs: ...

    def stats(self) -> SchedulerStats: ...

    def check_invariants(self) -> None: ...
