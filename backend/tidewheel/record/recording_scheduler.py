from __future__ import annotations

from collections.abc import Callable, Sequence

from tidewheel.batch import SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.errors import TidewheelError
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.record.recorder import Recorder
from tidewheel.request import FinishReason, Request
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.scheduler import Scheduler


class RecordingScheduler(Scheduler):
    """Scheduler that reports every call and its result to a recorder."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        recorder: Recorder,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`clock` measures how long calls take."""
        super().__init__(config, kv)
        self._recorder = recorder
        self._clock = clock

    def add_group(self, requests: Sequence[Request], now: float) -> list[Request]:
        try:
            evicted = super().add_group(requests, now)
        except TidewheelError as error:
            if self._recorder.is_open:
                self._recorder.added(now, requests, error.tag, ())
            raise
        if self._recorder.is_open:
            self._recorder.added(now, requests, "", evicted)
        return evicted

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> Request | None:
        request = super().cancel(request_id, reason)
        if self._recorder.is_open:
            self._recorder.cancelled(request_id, str(reason), was_there=request is not None)
        return request

    def expire(self, now: float) -> list[Request]:
        ended = super().expire(now)
        if self._recorder.is_open:
            self._recorder.expired(now, ended)
        return ended

    def fail_all(self, error: TidewheelError) -> list[Request]:
        ended = super().fail_all(error)
        if self._recorder.is_open:
            self._recorder.failed(ended)
        return ended

    def close_session(self, tenant: str, session_id: str) -> None:
        was_there = False
        try:
            super().close_session(tenant, session_id)
            was_there = True
        finally:
            if self._recorder.is_open:
                self._recorder.session_closed(tenant, session_id, was_there=was_there)

    def schedule(self, now: float) -> ScheduledBatch | None:
        begin = self._clock()
        batch = super().schedule(now)
        if self._recorder.is_open:
            self._recorder.scheduled(now, batch, self._clock() - begin)
        return batch

    def apply(self, batch: ScheduledBatch, sampled: SampledTokens, now: float) -> StepOutputs:
        begin = self._clock()
        outputs = super().apply(batch, sampled, now)
        if self._recorder.is_open:
            self._recorder.applied(now, sampled, outputs, self._clock() - begin)
            if not self.has_unfinished:
                self._recorder.flush()
        return outputs
