"""One engine: the loop of `EngineCore.step` with a cost model as its device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from tidewheel.batch import Int32Array, SampledTokens, ScheduledBatch
from tidewheel.errors import TidewheelError
from tidewheel.record.recorded_events import STOP_TOKEN, step_features
from tidewheel.request import Request
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.simulate.cost_model import CostModel

IDLE_POLL_S = 1e-3  # between looks of an engine that could start nothing

Ended = Callable[[int, Request], None]  # (replica number, request)


class Replica:
    """Scheduler driven turn by turn.

    A turn applies the finished batch as of its end, then schedules the next. Requests that arrived by either moment
    are added then.
    """

    def __init__(
        self,
        number: int,
        scheduler: Scheduler,
        cost: CostModel,
        ended: Ended,
        *,
        num_rows: int,
        pool: Int32Array | None = None,
        has_deadlines: bool = False,
    ) -> None:
        self.number = number
        self.is_idle = True
        self.num_steps = 0
        self.num_tokens = 0
        self.busy_seconds = 0.0
        self.scheduler = scheduler
        self._cost = cost
        self._ended = ended
        self._has_deadlines = has_deadlines
        self._pool = pool  # None: all tokens are alike
        self._inbox: deque[tuple[float, Request, int, int]] = deque()
        self._lasts: dict[str, tuple[int, int]] = {}  # id → last position, offset, before a row
        self._last_positions = np.zeros(num_rows, dtype=np.int64)  # row → position of the last token
        self._offsets = np.zeros(num_rows, dtype=np.int64)  # row → offset in the pool
        self._ordinary = np.ones(num_rows, dtype=np.int32)
        self._in_flight: deque[tuple[ScheduledBatch, float]] = deque()  # batch, end
        self._device_free = 0.0
        self._completes = False  # this turn begins with the oldest batch's end

    def submit(self, now: float, request: Request, num_output_tokens: int, offset: int) -> None:
        """Queue a request that stops after `num_output_tokens`, unknown to the scheduler."""
        self._inbox.append((now, request, request.num_prompt_tokens + num_output_tokens - 1, offset))

    def turn(self, now: float) -> float | None:
        """Return the time of the next turn; None: wait for an arrival."""
        if self._completes:
            batch, end = self._in_flight.popleft()
            self._receive(end)
            self._apply(batch, end)
        self._receive(now)
        if self._has_deadlines:
            for request in self.scheduler.expire(now):
                self._end(request)
        scheduled = self.scheduler.schedule(now)
        if scheduled is not None:
            self._launch(scheduled, now)
        next_turn = self._next_turn(now, is_full=scheduled is None)
        self.is_idle = next_turn is None
        return next_turn

    def _next_turn(self, now: float, *, is_full: bool) -> float | None:
        if not self._in_flight:
            self._completes = False
            return now + IDLE_POLL_S if self.scheduler.has_unfinished else None
        self._completes = is_full or len(self._in_flight) == self.scheduler.max_inflight_steps
        batch, end = self._in_flight[0]
        host_seconds = self._cost.turn_seconds(len(batch.rows))
        return (max(now, end) if self._completes else now) + host_seconds

    def _receive(self, now: float) -> None:
        inbox = self._inbox
        while inbox and inbox[0][0] <= now:
            _, request, last_position, offset = inbox.popleft()
            try:
                evicted = self.scheduler.add(request, now)
            except TidewheelError as error:
                request.error = error
                self._ended(self.number, request)
                continue
            self._lasts[request.request_id] = (last_position, offset)
            for waiter in evicted:
                self._end(waiter)

    def _launch(self, batch: ScheduledBatch, now: float) -> None:
        for new in batch.new_rows:
            self._last_positions[new.row], self._offsets[new.row] = self._lasts[new.request_id]
        seconds = self._cost.step_seconds(step_features(batch))
        self._device_free = max(now, self._device_free) + seconds
        self._in_flight.append((batch, self._device_free))
        self.busy_seconds += seconds
        self.num_steps += 1
        self.num_tokens += batch.num_tokens

    def _apply(self, batch: ScheduledBatch, end: float) -> None:
        outputs = self.scheduler.apply(batch, SampledTokens(batch.step_id, self._tokens(batch)), end)
        for request in outputs.finished:
            self._end(request)

    def _tokens(self, batch: ScheduledBatch) -> Int32Array:
        rows = batch.rows
        positions = batch.start_positions + batch.num_scheduled_tokens
        if self._pool is None:
            tokens = self._ordinary[: len(rows)].copy()
        else:
            tokens = self._pool.take(self._offsets.take(rows) + positions)
        tokens[positions == self._last_positions.take(rows)] = STOP_TOKEN
        if batch.num_decodes < len(rows):
            tokens[~batch.samples] = SampledTokens.NOT_SAMPLED
        return tokens

    def _end(self, request: Request) -> None:
        self._lasts.pop(request.request_id, None)
        self._ended(self.number, request)
