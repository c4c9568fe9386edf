"""A scheduler that is written down while it works."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidewheel.batch import SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.errors import NotFound, TidewheelError
from tidewheel.request import FinishReason, Request
from tidewheel.scheduler.interface import EngineScheduler
from tidewheel.scheduler.stats import SchedulerStats, WaitingRoom
from tidewheel.simulate.recorder import Recorder


class RecordingScheduler:
    """Passes every call on, and what came of it to the recorder. Decisions are those of the scheduler inside."""

    def __init__(self, scheduler: EngineScheduler, recorder: Recorder) -> None:
        self._scheduler = scheduler
        self._recorder = recorder

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished

    @property
    def max_inflight_steps(self) -> int:
        return self._scheduler.max_inflight_steps

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def add(self, request: Request, now: float) -> list[Request]:
        return self._add([request], now, lambda: self._scheduler.add(request, now))

    def add_group(self, requests: Sequence[Request], now: float) -> list[Request]:
        return self._add(requests, now, lambda: self._scheduler.add_group(requests, now))

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> Request | None:
        request = self._scheduler.cancel(request_id, reason)
        if self._recorder.is_open:
            self._recorder.cancelled(request_id, str(reason), was_there=request is not None)
        return request

    def expire(self, now: float) -> list[Request]:
        ended = self._scheduler.expire(now)
        if self._recorder.is_open:
            self._recorder.expired(now, ended)
        return ended

    def fail_all(self, error: TidewheelError) -> list[Request]:
        ended = self._scheduler.fail_all(error)
        if self._recorder.is_open:
            self._recorder.failed(ended)
        return ended

    def close_session(self, tenant: str, session_id: str) -> None:
        try:
            self._scheduler.close_session(tenant, session_id)
        except NotFound:
            self._closed(tenant, session_id, was_there=False)
            raise
        self._closed(tenant, session_id, was_there=True)

    def schedule(self, now: float) -> ScheduledBatch | None:
        batch = self._scheduler.schedule(now)
        if self._recorder.is_open:
            self._recorder.scheduled(now, batch)
        return batch

    def apply(self, batch: ScheduledBatch, sampled: SampledTokens, now: float) -> StepOutputs:
        outputs = self._scheduler.apply(batch, sampled, now)
        if self._recorder.is_open:
            self._recorder.applied(now, sampled, outputs)
            if not self._scheduler.has_unfinished:
                self._recorder.flush()
        return outputs

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def room(self, now: float) -> WaitingRoom:
        return self._scheduler.room(now)

    def check_invariants(self) -> None:
        self._scheduler.check_invariants()

    def _add(self, requests: Sequence[Request], now: float, add: Callable[[], list[Request]]) -> list[Request]:
        try:
            evicted = add()
        except TidewheelError as error:
            if self._recorder.is_open:
                self._recorder.added(now, requests, error.tag, ())
            raise
        if self._recorder.is_open:
            self._recorder.added(now, requests, "", evicted)
        return evicted

    def _closed(self, tenant: str, session_id: str, *, was_there: bool) -> None:
        if self._recorder.is_open:
            self._recorder.session_closed(tenant, session_id, was_there=was_there)
