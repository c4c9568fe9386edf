"""The front end: requests in, chunks out.

    submit ─► tokeniser threads ─► engine ─► on_deltas ─► outbox of the request ─► sender threads ─► sink
                                     ▲          │
                               gate ─┘          │
                     cancellation poller ───────┴─► the request is over, and the engine is told

Every submitted request ends its sink exactly once, however it ends. Nothing waits without a bound.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from tidewheel.engine.messages import AddRequest, CloseSession, Delta, EngineInfo, EngineStats, Room
from tidewheel.errors import Busy, Cancelled, DeadlineExceeded, Draining, InternalError, TidewheelError
from tidewheel.frontend.cancellation import CancellationPoller
from tidewheel.frontend.gate import Gate
from tidewheel.frontend.live import Ending, LiveRequest
from tidewheel.frontend.preparation import Preparer
from tidewheel.frontend.senders import SenderPool
from tidewheel.frontend.stats import FrontendStats, StatsRecorder, TokenTiming
from tidewheel.frontend.vacancy import Vacancy
from tidewheel.frontend.values import Chunk, GenerateRequest, Response, Sink, is_last
from tidewheel.request import FinishReason

logger = logging.getLogger(__name__)

_NUM_TOKENIZER_THREADS = 2
_MAX_PREPARING = 4096  # requests that wait to be tokenised
_MAX_PREPARING_PROMPTS = 64  # prompts of the largest size among them
_RETRY_AFTER_MS = 250
_CLOSE_TIMEOUT_S = 5.0


class EnginePort(Protocol):
    """What a front end asks of the engine."""

    def add(self, message: AddRequest | CloseSession) -> None:
        """Raises a `TidewheelError` when the engine cannot take it; then nothing follows."""

    def cancel(self, keys: Iterable[int]) -> None: ...

    def cancel_sequence(self, key: int, index: int) -> None:
        """One of a request's `n` sequences; the others go on."""


class Frontend:
    """Serves from construction to `close`. Is an `EngineListener`: `on_deltas`, `on_lost` and `on_stats` come from
    one thread, and never block."""

    def __init__(
        self,
        info: EngineInfo,
        model_dir: Path,
        engine: EnginePort,
        *,
        max_prompt_bytes: int,
        gate: Gate | None = None,
        num_senders: int = 4,
        poll_interval_s: float = 0.02,
    ) -> None:
        """`model_dir` is the folder of the tokenizer. Raises `ConfigError` in one line when it has none to use.

        With a `gate`, what the engine has no room for waits instead of being refused, and `wait_for_room` holds back.
        """
        self._preparer = Preparer(info, model_dir, max_prompt_bytes=max_prompt_bytes)
        self._engine = engine
        self._gate = gate
        self._vacancy = Vacancy() if gate is None else None
        self._max_preparing_bytes = _MAX_PREPARING_PROMPTS * max_prompt_bytes
        self._recorder = StatsRecorder()
        self._keys = itertools.count(1)
        self._lock = threading.Lock()
        self._live: dict[int, LiveRequest] = {}
        self._num_preparing = 0
        self._preparing_bytes = 0
        self._closed_by: TidewheelError | None = None
        self._tokenizers = ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._senders = SenderPool(num_senders, self._turn)
        self._poller = CancellationPoller(
            lambda: list(self._live.values()), self._cancel, self._expire, interval_s=poll_interval_s
        )
        self._poller.start()

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self._live)

    def stats(self) -> FrontendStats:
        return self._recorder.snapshot()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Returns at once; everything that can be wrong with the request is said to its sink."""
        arrival_ns = request.arrival_ns or time.monotonic_ns()
        live = LiveRequest(next(self._keys), request, sink, arrival_ns)
        self._recorder.received()
        with self._lock:
            refusal = self._closed_by or self._refusal(request)
            if refusal is None:
                self._live[live.key] = live
                self._num_preparing += 1
                self._preparing_bytes += request.prompt_bytes
                if self._gate is not None:
                    self._gate.enter(live.key)
                self._tokenizers.submit(self._prepare, live)
        if refusal is not None:
            self._recorder.ended_by(refusal, began=False)
            self._recorder.refused((time.monotonic_ns() - arrival_ns) * 1e-9)
            sink.fail(refusal)

    def wait_for_room(self) -> None:
        """Returns once one more request may be submitted; without a gate, at once."""
        if self._gate is not None:
            self._gate.wait()

    def close(self, error: TidewheelError | None = None) -> None:
        """Ends every live request with the error; what is submitted later gets it too."""
        with self._lock:
            if self._closed_by is not None:
                return
            self._closed_by = error = error or Draining("the server is shutting down")
            live = list(self._live.values())
        self._poller.close()
        if self._gate is not None:
            self._gate.release()
        for request in live:
            self._end(request, Ending(error=error))
        self._tokenizers.shutdown(wait=True, cancel_futures=True)
        if not self._senders.close(_CLOSE_TIMEOUT_S):
            logger.warning("%d requests could not be answered: their sinks block", self.num_live)

    def _refusal(self, request: GenerateRequest) -> TidewheelError | None:
        """Whether as much as may waits for the tokenizer already."""
        if self._num_preparing >= _MAX_PREPARING:
            full = f"{self._num_preparing} of {_MAX_PREPARING} requests"
        elif self._preparing_bytes + request.prompt_bytes > self._max_preparing_bytes:
            full = f"{self._preparing_bytes} of {self._max_preparing_bytes} prompt bytes"
        else:
            return None
        return Busy(f"too much waits to be tokenised: {full}", retry_after_ms=_RETRY_AFTER_MS)

    # --- tokeniser threads ----------------------------------------------------------------------------------------

    def _prepare(self, request: LiveRequest) -> None:
        try:
            prepared = self._preparer.prepare(request.key, request.asked, request.arrival_ns)
            message = prepared.message if isinstance(prepared.message, AddRequest) else None
            needs_every_delta = request.is_streamed or prepared.has_stop_strings
            if request.begin(prepared.outputs, message, needs_every_delta=needs_every_delta):
                if self._vacancy is not None and message is not None:
                    self._vacancy.claim(message)
                if self._gate is not None and message is not None:
                    self._gate.weigh(request.key, message.n, message.n * len(message.prompt) // 4)
                self._send_to_engine(request, prepared.message)
        except TidewheelError as error:
            self._end(request, Ending(error=error))
        except Exception:
            logger.exception("a request could not be prepared")
            self._end(request, Ending(error=InternalError("the request could not be prepared")))
        finally:
            with self._lock:
                self._num_preparing -= 1
                self._preparing_bytes -= request.asked.prompt_bytes

    def _send_to_engine(self, request: LiveRequest, message: AddRequest | CloseSession) -> None:
        try:
            self._engine.add(message)
        except TidewheelError:
            if self._vacancy is not None:  # the request may have been answered before it was claimed for
                self._vacancy.forget(request.key)
            raise
        if not request.begun():
            self._engine.cancel([request.key])

    # --- the gate -------------------------------------------------------------------------------------------------

    def _leave_gate(self, request: LiveRequest) -> None:
        """It has started, or is over."""
        if self._gate is not None:
            self._send_again(self._gate.leave(request.key))

    def _send_again(self, keys: list[int]) -> None:
        for key in keys:
            request = self._live.get(key)
            if request is None or request.message is None:
                continue
            try:
                self._send_to_engine(request, request.message)
            except TidewheelError as error:
                self._end(request, Ending(error=error))

    def _is_held_back(self, request: LiveRequest, delta: Delta) -> bool:
        """Whether the delta says that the engine has no room, and the request waits for it here."""
        if self._gate is None or delta.error is None or not delta.error.is_waiting_set_full or not request.hold():
            return False
        self._gate.refuse(request.key)
        return True

    # --- the engine's listener thread -----------------------------------------------------------------------------

    def on_deltas(self, deltas: list[Delta]) -> None:
        now_ns = time.monotonic_ns()
        timings = []
        for delta in deltas:
            request = self._live.get(delta.key)
            if request is None:
                continue  # answered already: cancelled, or ended by a stop string
            if self._is_held_back(request, delta):
                continue
            if delta.token_ids:
                if not request.has_begun:
                    self._leave_gate(request)
                timings.append(_timing(request, delta, now_ns))
            if request.post(delta):
                self._senders.put(request)
        self._recorder.tokens(timings)

    def on_lost(self, keys: list[int], error: TidewheelError) -> None:
        if self._vacancy is not None:
            self._vacancy.reset()
        for key in keys:
            request = self._live.get(key)
            if request is not None:
                self._end(request, Ending(error=error), is_at_engine=False)

    def on_stats(self, stats: EngineStats) -> None:
        """Engine-wide figures are published by whoever owns the engine, not by its front ends."""
        if self._gate is not None:
            self._send_again(self._gate.offer(stats.num_waiting))

    def on_room(self, room: Room) -> None:
        if self._vacancy is not None:
            self._vacancy.hear(room)

    # --- ends from outside ----------------------------------------------------------------------------------------

    def _cancel(self, request: LiveRequest) -> None:
        self._end(request, Ending(FinishReason.CANCELLED))

    def _expire(self, request: LiveRequest) -> None:
        """It is not at the engine, or the engine does not answer."""
        if request.has_begun:
            self._end(request, Ending(FinishReason.DEADLINE))
        else:
            self._end(request, Ending(error=DeadlineExceeded("the deadline passed before the request could start")))

    def _end(self, request: LiveRequest, ending: Ending, *, is_at_engine: bool = True) -> None:
        if request.end(ending) and is_at_engine:
            self._engine.cancel([request.key])
        if request.claim_turn():
            self._senders.put(request)

    # --- sender threads -------------------------------------------------------------------------------------------

    def _turn(self, request: LiveRequest) -> None:
        """Sends all that is new of a request in one response."""
        try:
            answer = self._answer(request)
        except Exception:
            logger.exception("the output of a request could not be made into text")
            answer = InternalError("the output could not be made into text")
        if isinstance(answer, TidewheelError):
            self._fail(request, answer)
        elif answer is not None:
            self._send(request, answer)
        if request.end_turn():
            self._senders.put(request)

    def _answer(self, request: LiveRequest) -> Response | TidewheelError | None:
        """The response of this turn, None if there is none yet."""
        deltas, ending = request.take()
        outputs = request.outputs
        if outputs is not None:
            stopped = outputs.push(deltas)
            if outputs.is_over:
                return outputs.take()
            for index in stopped:
                self._engine.cancel_sequence(request.key, index)
        if ending is None:
            return outputs.take() if outputs is not None and request.is_streamed and outputs.has_news else None
        if ending.error is not None:
            return ending.error
        if outputs is None:  # cancelled before it was tokenised, or nothing was to be generated
            return [Chunk(text="", finish_reason=ending.finish_reason)]
        outputs.end(ending.finish_reason)
        return outputs.take()

    def _send(self, request: LiveRequest, response: Response) -> None:
        is_over = is_last(response)
        if is_over:
            self._close(request)
            seconds = (time.monotonic_ns() - request.arrival_ns) * 1e-9
            first = response[0]  # counts for the request
            self._recorder.finished(first.finish_reason or "", seconds, first.perf)
        try:
            request.sink.send(response)
        except Exception:
            logger.exception("a response could not be sent")
            if not is_over:
                self._fail(request, Cancelled("the response could not be sent"))

    def _fail(self, request: LiveRequest, error: TidewheelError) -> None:
        self._close(request)
        self._recorder.ended_by(error, began=request.has_begun)
        if not request.was_accepted:
            self._recorder.refused((time.monotonic_ns() - request.arrival_ns) * 1e-9)
        with contextlib.suppress(Exception):  # nobody is left to tell
            request.sink.fail(error)

    def _close(self, request: LiveRequest) -> None:
        """Before the last response: the engine need not go on, and nothing more comes in."""
        if request.end(Ending()):
            self._engine.cancel([request.key])
        request.close()
        with self._lock:
            self._live.pop(request.key, None)
        if self._vacancy is not None:
            self._vacancy.forget(request.key)
        self._leave_gate(request)


def _timing(request: LiveRequest, delta: Delta, now_ns: int) -> TokenTiming:
    """The first token of a request counts from its arrival, that of a later sequence from nowhere."""
    last_ns = request.last_token_ns.get(delta.index, 0)
    is_first = not request.has_begun
    since_ns = request.arrival_ns if is_first else last_ns
    request.last_token_ns[delta.index] = now_ns
    num_prompt_tokens = request.outputs.num_input_tokens if is_first and request.outputs is not None else 0
    seconds = (now_ns - since_ns) * 1e-9 if since_ns else None
    return TokenTiming(seconds, len(delta.token_ids), num_prompt_tokens)
