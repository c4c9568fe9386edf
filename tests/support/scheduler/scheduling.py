"""Factories for scheduler tests, and a driver that plays the engine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from support.engine.fake_runner import FakeRunner, PendingTokens
from support.engine.request_ledger import RequestLedger
from support.scheduler.invariants import check_invariants
from tidewheel.batch import ScheduledBatch, StepOutputs
from tidewheel.errors import Busy, TidewheelError
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import FinishReason, Priority, Request, RequestState
from tidewheel.sampling import SamplingParams
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.scheduler import Scheduler


def make_request(
    request_id: str = "a",
    prompt: Sequence[int] | int = 4,
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    priority: Priority = Priority.NORMAL,
    arrival_time: float = 0.0,
    stop_token_ids: tuple[int, ...] = (),
    cache_salt: str = "",
    **fields: Any,
) -> Request:
    """Make a request; a number as `prompt` is a length, of tokens 0, 1, 2, …"""
    token_ids = range(prompt) if isinstance(prompt, int) else prompt
    return Request(
        request_id,
        np.array(list(token_ids), dtype=np.int32),
        SamplingParams(min_tokens=min_tokens),
        max_tokens=max_tokens,
        arrival_time=arrival_time,
        priority=priority,
        stop_token_ids=stop_token_ids,
        cache_salt=cache_salt,
        **fields,
    )


def numbered(request: Request, number: int) -> Request:
    """Number the request as the scheduler numbers arrivals, for tests of its parts."""
    request.sequence = number
    return request


def make_config(**changes: Any) -> SchedulerConfig:
    settings: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 256,
        "max_waiting_requests": 64,
        "max_waiting_tokens": 4096,
        "watermark": 0.0,
        "admit_by_growth": False,  # so that blocks run out
    }
    return SchedulerConfig(**(settings | changes))


def make_scheduler(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
    **changes: Any,
) -> Scheduler:
    kv = KVCacheManager(
        num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, num_host_blocks=num_host_blocks
    )
    return Scheduler(make_config(**changes), kv)


class SchedulerDriver(RequestLedger):
    """Scheduler and fake runner together, stepped by a test; what comes out goes into the ledger."""

    def __init__(
        self, *, num_blocks: int = 32, block_size: int = 4, bugs: Mapping[str, Any] | None = None, **changes: Any
    ) -> None:
        """`bugs` are settings of the scheduler that the books do not know."""
        super().__init__()
        self.scheduler = make_scheduler(num_blocks=num_blocks, block_size=block_size, **changes | dict(bugs or {}))
        for name in ("enable_prefix_caching", "num_host_blocks"):
            changes.pop(name, None)
        self.config = config = make_config(**changes)
        self.in_flight: deque[tuple[ScheduledBatch, PendingTokens]] = deque()
        self.expired: list[Request] = []  # of the last `expire`
        self.now = 0.0
        self.tick = 1.0  # seconds that each `schedule` and each `apply` takes
        self.runner = FakeRunner(
            num_rows=config.num_rows,
            num_blocks=num_blocks,
            block_size=block_size,
            token_budget=config.max_num_batched_tokens,
            salt_of=self._salt_of,
        )

    @property
    def kv(self) -> KVCacheManager:
        return self.scheduler._state.kv

    def num_computed_tokens(self, request: Request) -> int:
        """Return the count of a running request after the last batch that was applied."""
        return int(self.scheduler._state.columns.num_computed_tokens[request.row])

    def prefilling(self) -> set[str]:
        """Return the ids of running requests whose tokens at entry are not all scheduled."""
        columns = self.scheduler._state.columns
        starts = columns.num_computed_tokens + columns.num_inflight_tokens
        rows = (columns.running & (starts < columns.num_entered_tokens)).nonzero()[0].tolist()
        return {columns.request(row).request_id for row in rows}

    def ending(self) -> set[str]:
        """Return the ids of running requests that end by length with a token in flight."""
        columns = self.scheduler._state.columns
        ends = columns.num_tokens + columns.num_inflight_samples
        rows = (columns.running & (ends >= columns.max_num_tokens)).nonzero()[0].tolist()
        return {columns.request(row).request_id for row in rows}

    def _salt_of(self, request_id: str) -> str:
        """Name the requests that may share blocks: one tenant under one salt."""
        request = self.requests[request_id]
        return f"{request.tenant}/{request.cache_salt}"

    def add(self, request: Request) -> Request:
        self.add_group([request])
        return request

    def add_group(self, requests: list[Request]) -> list[Request]:
        """Return the evicted requests."""
        evicted = self.scheduler.add_group(requests, self.now)
        for request in requests:
            self.accept(request)
        for request in evicted:
            assert isinstance(request.error, Busy) and request.error.retry_after_ms
            assert request.finish_reason is FinishReason.ERROR and request.first_scheduled_time is None
            self.end(request)
        return evicted

    def expire(self) -> list[Request]:
        self.expired = expired = self.scheduler.expire(self.now)
        for request in expired:
            is_late = min(request.deadline or math.inf, request.latest_start) <= self.now
            assert is_late or (request.lora is not None and request.error is request.lora.error)
            self.end(request)
        return expired

    def schedule(self) -> ScheduledBatch | None:
        """Schedule as the engine does: requests that are too late end first."""
        self.now += self.tick
        self.expire()
        batch = self.scheduler.schedule(self.now)
        if batch is not None:
            self.in_flight.append((batch, self.runner.launch(batch)))
        return batch

    def apply(self) -> StepOutputs:
        batch, pending = self.in_flight.popleft()
        self.now += self.tick
        sampled = pending.wait()
        outputs = self.scheduler.apply(batch, sampled, self.now)
        self.take(outputs)
        return outputs

    def step(self) -> StepOutputs | None:
        """Launch as many batches as are allowed, then apply one; return None if there was none."""
        while len(self.in_flight) < self.config.max_inflight_steps and self.schedule() is not None:
            pass
        return self.apply() if self.in_flight else None

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> Request | None:
        request = self.scheduler.cancel(request_id, reason)
        known = request_id in self.requests and request_id not in self.ended
        assert (request is not None) == known
        if request is not None:
            assert request.finish_reason is reason
            self.end(request)
        return request

    def fail_all(self, error: TidewheelError) -> list[Request]:
        failed = self.scheduler.fail_all(error)
        self.in_flight.clear()
        self.runner.in_flight.clear()
        for request in failed:
            assert request.error is error
            self.end(request)
        assert not self.scheduler.has_unfinished
        return failed

    def end(self, request: Request) -> None:
        super().end(request)
        assert request.state is RequestState.FINISHED and request.row == -1
        assert request.output_token_ids == self.delivered[request.request_id]

    def run(self, max_steps: int = 5000) -> None:
        """Step until everything has ended and nothing is in flight."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.in_flight:
                break
            outputs = self.step()
            assert outputs is not None or not self.scheduler.has_unfinished, "requests wait and nothing runs"
        else:
            raise AssertionError(f"still not done after {max_steps} steps")
        check_invariants(self.scheduler)
        self.check_all_over(self.scheduler.stats())
