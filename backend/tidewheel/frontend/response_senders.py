from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from tidewheel.engine.engine_client import EngineClient
from tidewheel.engine.messages import Delta
from tidewheel.errors import Cancelled, InternalError, TidewheelError
from tidewheel.frontend.interface import OutputChunk, Response, is_last
from tidewheel.frontend.live_request import EndedRequest, LiveRequest
from tidewheel.frontend.request_figures import FinishedRequest, StatsRecorder
from tidewheel.frontend.threads import Workers
from tidewheel.frontend.token_columns import TokenColumns
from tidewheel.request import Priority

logger = logging.getLogger(__name__)

_LOAD = 0.7  # of the senders' time, for all streams in turn
_SMOOTHING = 1 / 32
_LOOKS = 4  # in an interval
_LOOK_S = 0.02


class ResponseSenders:
    """Threads that send. A turn sends all new output of a request as one response.

    A request has one turn at a time, so its responses keep their order. First tokens and ends go first, then streams
    whose last turn is an interval ago: 0 while the senders can send every token alone, at most `interval_s`.
    """

    def __init__(
        self,
        num_senders: int,
        interval_s: float,
        live: Mapping[int, LiveRequest],
        columns: TokenColumns,
        engine: EngineClient,
        recorder: StatsRecorder,
        forget: Callable[[LiveRequest], None],
        on_idle: Callable[[], None],
        on_ended: Callable[[EndedRequest], None] | None,
    ) -> None:
        """Call `forget` before the last response of a request."""
        self._live = live
        self._columns = columns
        self._engine = engine
        self._recorder = recorder
        self._forget = forget
        self._on_idle = on_idle
        self._on_ended = on_ended
        self._max_interval_ns = interval_s * 1e9
        self._turn_ns = 0.0  # duration, smoothed
        self._num_senders = num_senders
        self._changed = threading.Condition()
        self._has_timekeeper = False  # among the threads that wait
        self._look_ns = 0  # when to look for due streams again: many at once cost less
        self._urgent: deque[LiveRequest] = deque()
        self._due: deque[int] = deque()
        self._is_closed = False
        self._senders = Workers("sender", num_senders, self._take, self._turn)

    def put(self, request: LiveRequest) -> None:
        """Queue a claimed turn, before all streams."""
        with self._changed:
            self._urgent.append(request)
            self._changed.notify()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def fail(self, request: LiveRequest, error: TidewheelError) -> None:
        self._close(request)
        seconds = None if request.was_accepted else (time.monotonic_ns() - request.arrival_ns) * 1e-9
        self._recorder.failed(error, had_output=request.has_output, refused_after=seconds)
        with contextlib.suppress(Exception):  # the client is gone
            request.sink.fail(error)
        self._report_end(request, error=error)

    def close(self, timeout_s: float) -> bool:
        """Return whether all turns ended in time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        return self._senders.join(timeout_s)

    def _take(self) -> LiveRequest | None:
        with self._changed:
            while (request := self._next()) is None:
                if self._is_closed:
                    return None
                self._wait()
            if self._urgent or self._due or not (self._has_timekeeper or self._columns.next_taken_ns() is None):
                self._changed.notify()
            return request

    def _wait(self) -> None:
        """Wait for a change; one thread waits only until a stream is due."""
        if self._has_timekeeper:
            self._changed.wait()
            return
        self._has_timekeeper = True
        self._changed.wait(self._seconds_to_wait())
        self._has_timekeeper = False

    def _next(self) -> LiveRequest | None:
        if self._urgent:
            return self._urgent.popleft()
        if not self._due and (now_ns := time.monotonic_ns()) >= self._look_ns:
            interval_ns = self._interval_ns()
            self._look_ns = now_ns + interval_ns // _LOOKS
            self._due.extend(self._columns.due(now_ns - interval_ns))
        while self._due:
            request = self._live.get(self._due.popleft())
            if request is not None and request.claim_turn():
                return request
        return None

    def _interval_ns(self) -> int:
        round_ns = self._columns.num_awaited() * self._turn_ns / self._num_senders
        return int(min(self._max_interval_ns, round_ns / _LOAD))

    def _seconds_to_wait(self) -> float | None:
        taken_ns = self._columns.next_taken_ns()
        if taken_ns is None:
            return _LOOK_S if self._live else None  # another thread may leave tokens, and be held up
        return max(taken_ns + self._interval_ns(), self._look_ns) * 1e-9 - time.monotonic()

    def _turn(self, request: LiveRequest) -> None:
        begin_ns = time.monotonic_ns()
        try:
            answer = self._answer(request, begin_ns)
        except Exception:
            logger.exception("the output of a request could not be made into text")
            answer = InternalError("the output could not be made into text")
        if isinstance(answer, TidewheelError):
            self.fail(request, answer)
        elif answer is not None:
            self._send(request, answer)
        if request.end_turn():
            self.put(request)
        elif request.wants_chunks:
            self._columns.await_tokens(request.key, has_output=request.has_deltas)
        self._turn_ns += (time.monotonic_ns() - begin_ns - self._turn_ns) * _SMOOTHING

    def _answer(self, request: LiveRequest, now_ns: int) -> Response | TidewheelError | None:
        deltas, ending = request.take_output()  # before the tokens, which precede them
        if token_ids := self._columns.take(request.key, now_ns):
            deltas = [Delta(request.key, token_ids), *deltas]
        outputs = request.outputs
        if outputs is not None:
            stopped = outputs.push(deltas)
            if outputs.is_over:
                return outputs.take()
            for index in stopped:
                self._engine.cancel_sequence(request.key, index)
        if ending is None:
            return outputs.take() if outputs is not None and request.asked.stream and outputs.has_tokens else None
        if ending.error is not None:
            return ending.error
        if outputs is None:  # cancelled before tokenisation, or nothing to generate
            return [OutputChunk(text=request.answer, finish_reason=ending.finish_reason)]
        outputs.end(ending.finish_reason)
        return outputs.take()

    def _send(self, request: LiveRequest, response: Response) -> None:
        is_over = is_last(response)
        if is_over:
            self._close(request)
            self._count_finished(request, response)
        request.num_responses += 1
        try:
            request.sink.send(response)
        except Exception:
            logger.exception("a response could not be sent")
            if not is_over:
                self.fail(request, Cancelled("the response could not be sent"))
        if is_over:
            self._report_end(request, response)

    def _count_finished(self, request: LiveRequest, response: Response) -> None:
        try:
            self._recorder.finished(_summary(request, response))
            if not self._live:
                self._on_idle()
        except Exception:
            logger.exception("the figures of a request could not be published")

    def _report_end(self, request: LiveRequest, response: Response = (), error: TidewheelError | None = None) -> None:
        if self._on_ended is None:
            return
        try:
            self._on_ended(EndedRequest.of(request, time.monotonic_ns(), response, error))
        except Exception:
            logger.exception("the end of a request could not be noted")

    def _close(self, request: LiveRequest) -> None:
        if request.mark_answered():
            self._engine.cancel([request.key])
        self._forget(request)


def _summary(request: LiveRequest, response: Response) -> FinishedRequest:
    first = response[0]  # stands for the request
    return FinishedRequest(
        reason=first.finish_reason or "",
        seconds=(time.monotonic_ns() - request.arrival_ns) * 1e-9,
        num_prompt_tokens=first.num_input_tokens,
        num_output_tokens=request.outputs.num_output_tokens if request.outputs is not None else [],
        stats=first.stats,
        priority=Priority(request.urgency.priority),
    )
