from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tidewheel.batch import RowError, SampledTokens, ScheduledBatch, StepOutputs, no_ids
from tidewheel.engine.recovery import Failure, attempt, no_tokens, recover
from tidewheel.errors import InternalError, TidewheelError
from tidewheel.kvcache.sessions import SessionLimits
from tidewheel.request import FinishReason, Progress, Request
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.stats import EngineStats, WaitingRoom

log = logging.getLogger(__name__)


class PendingTokens(Protocol):
    def wait(self) -> SampledTokens: ...


class Runner(Protocol):
    """Interface of `tidewheel.runner.model_runner.ModelRunner`."""

    def launch(self, batch: ScheduledBatch) -> PendingTokens: ...


class _InFlight(NamedTuple):
    batch: ScheduledBatch
    pending: PendingTokens
    scheduled_at: float


Deliver = Callable[[StepOutputs], None]


class EngineCore:
    """Loop over scheduler and runner, on one thread.

    With two steps in flight, the device computes one while the tokens of the other are applied and sent. `receive`
    calls `add` and `cancel`: before a step is planned, and before its tokens are applied, so that cancelled requests
    get none. `deliver` gets every new token and each added request's one end; it may call `cancel`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        deliver: Deliver,
        *,
        receive: Callable[[], None] = lambda: None,
        beat: Callable[[float], None] = lambda _: None,
        first_step_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call `beat` before each step with its predicted time; `first_step_s` is that of the first."""
        self._scheduler = scheduler
        self._runner = runner
        self._deliver = deliver
        self._receive = receive
        self._beat = beat
        self._first_step_s = first_step_s
        self._expected_s = 0.0  # of the newest step
        self._clock = clock
        self._in_flight: deque[_InFlight] = deque()
        self._request_ids: dict[int, str] = {}  # by row of the newest batch
        self._step_seconds = 0.0
        self._last_end = clock()
        self._last_stats = (clock(), 0.0)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_unfinished

    def add(self, request: Request) -> None:
        """Raise an error if the scheduler refuses. Then nothing is delivered."""
        self._deliver_ended(self._scheduler.add(request, self._clock()))

    def add_group(self, requests: Sequence[Request]) -> None:
        """Add all requests of one prompt, or none."""
        self._deliver_ended(self._scheduler.add_group(requests, self._clock()))

    def reconfigure(self, config: SchedulerConfig, session_limits: SessionLimits) -> None:
        """Take other settings. Steps in flight and requests go on."""
        self._scheduler.reconfigure(config, session_limits)

    def close_session(self, tenant: str, session_id: str) -> None:
        """Raise `NotFound` if there is no such session."""
        self._scheduler.close_session(tenant, session_id)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End the request in any state. Ignore unknown and finished ids."""
        request = self._scheduler.cancel(request_id, reason)
        if request is not None:
            self._deliver_ended([request])

    def fail_all(self, error: TidewheelError) -> None:
        """End every request with the error."""
        self._in_flight.clear()
        self._deliver_ended(self._scheduler.fail_all(error))

    def step(self) -> bool:
        """Return False if there was nothing to do."""
        self._receive()
        now = self._clock()
        self._deliver_ended(self._scheduler.expire(now))
        batch = self._scheduler.schedule(now)
        if batch is not None:
            self._announce(batch)
            self._in_flight.append(_InFlight(batch, self._launch(batch), now))
        if not self._in_flight:
            return False
        for _ in range(self._num_to_complete(batch)):
            self._complete()
        return True

    def _announce(self, batch: ScheduledBatch) -> None:
        """Beat for the step and the one before it, which may be in flight."""
        before, predicted = self._expected_s, self._scheduler.predict_seconds(batch)
        self._expected_s = self._first_step_s if predicted is None else predicted
        self._beat(before + self._expected_s)

    def _launch(self, batch: ScheduledBatch) -> PendingTokens:
        for new in batch.new_rows:
            self._request_ids[new.row] = new.request_id
        return attempt(lambda: self._runner.launch(batch))

    def _num_to_complete(self, batch: ScheduledBatch | None) -> int:
        """Return the steps to wait for: after a failed launch all, because a later one would read its tokens."""
        if isinstance(self._in_flight[-1].pending, Failure):
            return len(self._in_flight)
        return int(batch is None or len(self._in_flight) == self._scheduler.max_inflight_steps)

    def _complete(self) -> None:
        batch, pending, scheduled_at = self._in_flight.popleft()
        result = attempt(pending.wait)
        del pending  # a retry needs its room
        tokens = self._survive(batch, result) if isinstance(result, Failure) else result
        self._receive()
        self._deliver(self._scheduler.apply(batch, tokens, self._clock()))
        end = self._clock()
        # Of two steps in flight, the second begins when the first ends.
        self._step_seconds += end - max(scheduled_at, self._last_end)
        self._last_end = end

    def _survive(self, batch: ScheduledBatch, failure: Failure) -> SampledTokens:
        """Run the step again with fewer rows. If a later one has read its missing tokens, end its requests instead.

        Requests that have left their rows since are computed again.
        """
        if not self._in_flight:
            return recover(lambda rest: self._runner.launch(rest).wait(), batch, failure, self._give_up)
        left = set(self._in_flight[0].batch.freed_rows.tolist())
        for row in batch.rows.tolist():
            if row not in left:
                self._give_up(row, failure.error)
        return no_tokens(batch)

    def _give_up(self, row: int, error: Exception) -> None:
        log.error("a request is given up: %s", error, exc_info=error)
        request = self._scheduler.cancel(self._request_ids[row], FinishReason.ERROR)
        if request is not None:
            request.error = InternalError(
                "the sampling of this request failed; the server's log says why"
                if isinstance(error, RowError)
                else f"the device ran out of memory at {request.num_tokens} tokens of this request: send a shorter "
                "one, or lower max_num_batched_tokens or gpu_memory_utilization"
            )
            self._deliver_ended([request])

    def _deliver_ended(self, requests: list[Request]) -> None:
        if requests:
            self._deliver(StepOutputs([], no_ids(), None, requests))

    def unfinished(self) -> Iterator[Progress]:
        """Yield all requests, in order of arrival."""
        return self._scheduler.unfinished()

    def room(self) -> WaitingRoom:
        return self._scheduler.waiting_room(self._clock())

    def observe_refused(self, refused: Mapping[str, int]) -> None:
        self._scheduler.observe_refused(refused)

    def check_invariants(self) -> None:
        self._scheduler.check_invariants()

    def stats(self) -> EngineStats:
        """Return a snapshot. `busy_fraction` is since the last one."""
        now = self._clock()
        then, busy = self._last_stats
        self._last_stats = (now, self._step_seconds)
        stats = self._scheduler.stats()
        stats.step_seconds = self._step_seconds
        stats.oldest_wait_by_class = self._scheduler.oldest_waits(now)
        stats.busy_fraction = min(1.0, (self._step_seconds - busy) / max(now - then, 1e-9))
        return stats
