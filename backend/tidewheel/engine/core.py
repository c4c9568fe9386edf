"""The step: schedule, run, apply, deliver. The engine process and `LLM` share it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tidewheel.batch import SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.engine.recovery import is_out_of_memory, no_tokens, recover
from tidewheel.engine.runner import Computed, PendingTokens, Runner
from tidewheel.errors import InternalError, TidewheelError
from tidewheel.request import FinishReason, Request
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.stats import EngineStats, WaitingRoom


class _InFlight(NamedTuple):
    batch: ScheduledBatch
    pending: PendingTokens
    began: float  # when it was scheduled


Deliver = Callable[[StepOutputs], None]


class EngineCore:
    """Loop over scheduler and runner, on one thread.

    With two steps in flight, a step is launched before the tokens of the last one are awaited. The device computes it
    while they are applied, delivered and sent.

    `receive` runs before a step is planned, and again before its tokens are applied, so that requests cancelled
    meanwhile get no further token. It calls `add` and `cancel`. `deliver` gets every new token and each added
    request's one end; it may call `cancel`. Deadlines are checked before every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        deliver: Deliver,
        *,
        receive: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._deliver = deliver
        self._receive = receive
        self._clock = clock
        self._in_flight: deque[_InFlight] = deque()
        self._request_ids: dict[int, str] = {}  # by row of the newest batch
        self._step_seconds = 0.0
        self._last_end = clock()  # of a step
        self._last_stats = (clock(), 0.0)

    @property
    def has_unfinished(self) -> bool:
        """Return whether a request or a step is unfinished."""
        return bool(self._in_flight) or self._scheduler.has_unfinished

    def add(self, request: Request) -> None:
        """Add a request. If the scheduler refuses, raise its error and deliver nothing."""
        self._deliver_ended(self._scheduler.add(request, self._clock()))

    def add_group(self, requests: Sequence[Request]) -> None:
        """Add all requests of one prompt, or none."""
        self._deliver_ended(self._scheduler.add_group(requests, self._clock()))

    def close_session(self, tenant: str, session_id: str) -> None:
        """Raise `NotFound` if there is no such session."""
        self._scheduler.close_session(tenant, session_id)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End the request in any state. Ignore unknown and finished ids."""
        request = self._scheduler.cancel(request_id, reason)
        if request is not None:
            self._deliver_ended([request])

    def fail_all(self, error: TidewheelError) -> None:
        """End every request with the error. Forget steps in flight."""
        self._in_flight.clear()
        self._deliver_ended(self._scheduler.fail_all(error))

    def step(self) -> bool:
        """Run one turn. Return False if there was nothing to do."""
        self._receive()
        started = self._clock()
        self._deliver_ended(self._scheduler.expire(started))
        batch = self._scheduler.schedule(started)
        if batch is not None:
            self._in_flight.append(_InFlight(batch, self._launch(batch), started))
        if not self._in_flight:
            return False
        if batch is None or len(self._in_flight) == self._scheduler.max_inflight_steps:
            self._complete()
        return True

    def _complete(self, later: ScheduledBatch | None = None) -> None:
        """Complete the oldest step in flight. `later` was launched after it and failed."""
        batch, pending, began = self._in_flight.popleft()
        if later is None and self._in_flight:
            later = self._in_flight[0].batch
        try:
            tokens = pending.wait()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # its frames hold tensors, and the retry needs their room
            del pending
            tokens = self._recover(batch, failure) if later is None else self._lose(batch, later)
        self._receive()
        self._deliver(self._scheduler.apply(batch, tokens, self._clock()))
        end = self._clock()
        self._step_seconds += end - max(began, self._last_end)  # the second of two in flight begins at the last end
        self._last_end = end

    def _launch(self, batch: ScheduledBatch) -> PendingTokens:
        try:
            return self._runner.launch(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)
        finally:
            for new in batch.new_rows:
                self._request_ids[new.row] = new.request_id
        while self._in_flight:  # frees what the device holds for them
            self._complete(later=batch)
        return Computed(self._recover(batch, failure))

    def _recover(self, batch: ScheduledBatch, failure: Exception) -> SampledTokens:
        return recover(self._runner, batch, failure, self._give_up)

    def _lose(self, batch: ScheduledBatch, later: ScheduledBatch) -> SampledTokens:
        """End the requests of a failed step, because a later step has read its missing tokens. Requests that left
        their rows in between are computed again. They and all others continue.
        """
        left = set(later.freed_rows.tolist())
        for row in batch.rows.tolist():
            if row not in left:
                self._give_up(row)
        return no_tokens(batch)

    def _give_up(self, row: int) -> None:
        request = self._scheduler.cancel(self._request_ids[row], FinishReason.ERROR)
        if request is not None:
            request.error = InternalError(
                f"the device ran out of memory at {request.num_tokens} tokens of this request: send a shorter one, "
                "or lower max_num_batched_tokens or gpu_memory_utilization"
            )
            self._deliver_ended([request])

    def _deliver_ended(self, requests: list[Request]) -> None:
        if requests:
            self._deliver(StepOutputs([], [], None, requests))

    def room(self) -> WaitingRoom:
        return self._scheduler.waiting_room(self._clock())

    def observe_refused(self, refused: Mapping[str, int]) -> None:
        self._scheduler.observe_refused(refused)

    def check_invariants(self) -> None:
        self._scheduler.check_invariants()

    def stats(self) -> EngineStats:
        """Return a snapshot. `busy_fraction` covers the time since the last one."""
        now = self._clock()
        then, busy = self._last_stats
        self._last_stats = (now, self._step_seconds)
        stats = self._scheduler.stats()
        stats.step_seconds = self._step_seconds
        stats.busy_fraction = min(1.0, (self._step_seconds - busy) / max(now - then, 1e-9))
        return stats
